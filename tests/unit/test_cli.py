"""`moe-opt` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_moe_opt.cli.main import main


def _run(monkeypatch, *arguments, world=1):
    """Exit code of `moe-opt ARGUMENTS` as the first of `world` ranks; for commands that refuse before they start."""
    monkeypatch.setattr(sys, "argv", ["moe-opt", *arguments])
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "world", "sentence"),
    [
        (
            "--dispatchers alltoall,montana",
            1,
            "--dispatchers montana is unknown: choose from alltoall, allgather, monta, deepspeed",
        ),
        ("--ep 3", 3, "--ep 3 does not divide --experts 8: choose a divisor of 8"),
        ("--tp 3", 4, "--tp 3 does not divide the 4 ranks of this run: choose a divisor"),
        (
            "--ep 4 --expert-tp 2",
            4,
            "--ep 4 x --expert-tp 2 = 8 does not divide the 4 ranks of this run: choose sizes whose product does",
        ),
        (
            "--expert-tp 2",
            1,
            "--ep 1 x --expert-tp 2 = 2 does not divide the 1 ranks of this run: choose sizes whose product does",
        ),
        ("--topk 9", 1, "--topk 9 is more than --experts 8: choose at most that"),
        ("--ffn-hidden 33 --expert-tp 2", 2, "--expert-tp 2 does not divide --ffn-hidden 33: choose a divisor"),
        ("--pad-to-capacity", 1, "--pad-to-capacity needs a capacity to pad to: give --capacity-factor"),
        (
            "--routing zip",
            1,
            "--routing zip is unknown: choose one of uniform, zipf, one-hot-expert or trace:FILE",
        ),
        (
            "--routing trace:nowhere.pt",
            1,
            "--routing trace:nowhere.pt does not exist: give an .npz or .pt with one array of integers [tokens, topk]",
        ),
        (
            "--json nowhere/out.json",
            1,
            "--json nowhere/out.json: its folder does not exist; create it or choose another",
        ),
    ],
)
def test_bench_layer_refuses(monkeypatch, capsys, arguments, world, sentence):
    assert _run(monkeypatch, "bench", "layer", *arguments.split(), world=world) == 2
    assert capsys.readouterr().err == f"moe-opt: {sentence}\n"


def test_one_rank_of_a_node_speaks(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _run(monkeypatch, "bench", "layer", "--topk", "9") == 2
    assert capsys.readouterr().err == ""


def test_stale_extension_is_one_sentence(monkeypatch, capsys):
    def stale(options=None):
        raise ImportError("The compiled extension of megatron-moe-opt is missing: build it with X.")

    monkeypatch.setattr("megatron_moe_opt.register", stale)
    assert _run(monkeypatch, "bench", "layer") == 2
    assert (
        capsys.readouterr().err == "moe-opt: The compiled extension of megatron-moe-opt is missing: build it with X.\n"
    )


@pytest.mark.parametrize("arguments", ["bench layer --topk two", "bench layer --tokens 0", "bench nothing"])
def test_malformed_options(monkeypatch, capsys, arguments):
    assert _run(monkeypatch, *arguments.split()) == 2
    assert "Error" in capsys.readouterr().err


def test_bench_layer_in_one_process(tmp_path):
    """The whole command without torchrun: table on standard output, everything in the JSON file."""
    file = tmp_path / "bench.json"
    shape = "--tokens 48 --hidden 32 --ffn-hidden 64 --experts 4 --capacity-factor 1.0 --steps 2 --warmup 1"
    command = f"-m megatron_moe_opt.cli.main bench layer --dispatchers monta --seed 7 {shape} --json {file}"
    run = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    for text in (
        "48 tokens a rank, hidden 32, expert hidden 64, 4 experts, top-2, fp32, TP 1, EP 1, expert-TP 1, ",
        "routing uniform, capacity factor 1",
        "seed 7, 1 warm-up and 2 timed rounds, interleaved",
        "1 ranks on 1 node(s), cpu, gloo",
        "links: none between ranks",
        "ratio to alltoall",
    ):
        assert text in run.stdout, run.stdout
    report = json.loads(file.read_text())
    assert report["settings"]["dispatchers"] == ["alltoall", "monta"]  # the baseline is added, and goes first
    assert report["environment"]["torch"] and report["environment"]["megatron-core"]
    stock, monta = report["results"]
    assert stock["ratios"] == [1.0, 1.0]
    pairs = zip(monta["seconds"], stock["seconds"], strict=True)
    assert monta["ratios"] == [ours / alltoall for ours, alltoall in pairs]
    assert monta["median_ratio"] == pytest.approx(sum(monta["ratios"]) / 2)
    assert monta["median_seconds"] == pytest.approx(sum(monta["seconds"]) / 2)
    assert min(monta["seconds"]) > 0
    assert monta["output_difference"] <= 1e-6 and monta["gradient_difference"] <= 1e-6
    assert monta["wire_limit"] is None and monta["traffic"] == []
