"""`moe-opt` as a user runs it."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from rich.table import Table

import megatron_moe_opt
from megatron_moe_opt.cli.console import report_console
from megatron_moe_opt.cli.main import app, main
from megatron_moe_opt.errors import ConfigurationError, ExtensionError, LayerError
from megatron_moe_opt.planning.costs.cluster import Cluster, World
from megatron_moe_opt.schedules.schedule import Kind
from tests.ranks.job import output_of
from tools.bench import choice, executor, kernels, saa
from tools.bench.timing import Row, Timing


def _pages(command, *words):
    """The words of every command, and its page of help."""
    page = command.get_help(
        command.context_class(command, info_name=" ".join(("moe-opt", *words)), max_content_width=80)
    )
    yield words, page.splitlines()
    for name, below in getattr(command, "commands", {}).items():
        yield from _pages(below, *words, name)


def test_help_reads_at_80_columns():
    """No line is longer, and the lists of commands are not cut off."""
    command = typer.main.get_command(app)
    assert len(command.commands) <= 8
    pages = dict(_pages(command))
    assert ("trace", "place") in pages
    for words, lines in pages.items():
        assert max(map(len, lines)) <= 80, words
        assert not any(line.endswith("...") for line in lines[1:]), words  # the first one says how it is called
    of_plan = command.commands["plan"].params
    assert len(of_plan) <= 26
    headings = [line for line in pages["plan",] if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options:", "Layout:", "Step:", "MoE layers:", "What is shown:"]


def test_version(monkeypatch, capsys):
    assert _run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"megatron-moe-opt {megatron_moe_opt.__version__}\n"


def test_help_names_defaults_that_depend(monkeypatch, capsys):
    assert _run(monkeypatch, "plan", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "[default: (the file's, or 1); x>=1]" in shown and "[default: (dropless); 0.001<=x<=1000000.0]" in shown


@pytest.mark.parametrize(("budget", "status"), [("512MB", 2), ("0", 2), ("64MiB", 0), ("67108864", 0)])
def test_a_budget_is_written_as_in_training(monkeypatch, capsys, budget, status):
    monkeypatch.setenv("COLUMNS", "200")
    arguments = "plan --cluster pcie --model mixtral-8x7b --world 8 --ep 8 --activation-budget"
    assert _run(monkeypatch, *arguments.split(), budget) == status
    printed = capsys.readouterr()
    if status:
        assert f"'{budget}' is not a number of bytes above 0, such as 512MiB or 1.5GiB" in printed.err
    else:
        assert "more than the budget of 67108864" in " ".join(printed.out.replace("│", "").split())


def _run(monkeypatch, *arguments, world=1, commands=app):
    """Exit code of `moe-opt ARGUMENTS` as the first of `world` ranks; for commands that refuse before they start."""
    monkeypatch.setattr(sys, "argv", ["moe-opt", *arguments])
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit) as end:
        main(commands)
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "world", "sentence"),
    [
        (
            "--dispatchers alltoall,montana",
            1,
            "--dispatchers montana is unknown: choose from alltoall, allgather, flex, monta, parm, netmoe, mpmoe, "
            "deepspeed, expert-migration, auto",
        ),
        (
            "--dispatchers alltoall:O2x4",
            1,
            "--dispatchers alltoall:O2x4: only monta, parm, netmoe, mpmoe, expert-migration have variants; "
            "write alltoall",
        ),
        (
            "--dispatchers deepspeed:auto",
            1,
            "--dispatchers deepspeed:auto: only monta, parm, netmoe, mpmoe, expert-migration have variants; "
            "write deepspeed",
        ),
        (
            "--dispatchers parm:O3",
            1,
            "--dispatchers parm:O3: write a schedule (S1, S2, or AAS: S2 without overlap), or parm:auto",
        ),
        (
            "--dispatchers mpmoe:4:S5",
            1,
            "--dispatchers mpmoe:4:S5: write a number of partitions, where they share memory how (none, S1, S2, S3, "
            "S4), and chunks of each, joint where rows go to all shards of an expert at once, shared-rows where TP "
            "ranks share them out, or hops where a token crosses links once, with the sizes of domains in which "
            "experts travel, such as mpmoe:4, mpmoe:4:c2, mpmoe:4:S3, mpmoe:4:joint, mpmoe:4:S3:hops or "
            "mpmoe:4:hops:2x1; or mpmoe:auto",
        ),
        (
            "--dispatchers mpmoe:4 --dispatch-only",
            1,
            "--dispatch-only leaves out the experts that mpmoe pipelines through: drop it",
        ),
        (
            "--dispatchers auto --dispatch-only",
            1,
            "--dispatch-only has no layer whose steps auto could try: drop one of the two",
        ),
        ("--replicated", 1, "--replicated is about the ranks of a TP group: give --tp 2 or more, or drop it"),
        (
            "--replicated --tp 2 --dispatchers alltoall",
            2,
            "--dispatchers alltoall does not train on --replicated tokens: leave it out, or drop --replicated",
        ),
        (
            "--replicated --tp 2 --dispatch-only",
            2,
            "--dispatch-only leaves out what --replicated is about: drop one of them",
        ),
        (
            "--dispatch-only --shared-ffn-hidden 8",
            1,
            "--dispatch-only leaves out all experts: leave --shared-ffn-hidden out, too",
        ),
        ("--dispatchers monta:auto", 1, "--dispatchers monta:auto chooses by measurements: give --profile"),
        ("--dispatchers auto", 1, "--dispatchers auto chooses by measurements: give --profile"),
        ("--dispatchers monta,,parm", 1, "--dispatchers has an empty name: separate names by one comma each"),
        (
            "--dispatchers monta:O1x4",
            1,
            "--dispatchers monta:O1x4: O1 does not cut; write monta:O1, or take O2 or O3",
        ),
        (
            "--dispatchers monta:O3x4 --profile f",
            1,
            "--profile f: nothing reads it; add auto, or monta:auto or the like, to --dispatchers, or -o for a file "
            "with predictions, or drop it",
        ),
        (
            "--dispatchers monta:auto --profile nowhere.json",
            1,
            "nowhere.json cannot be read: No such file or directory; give the path of a file",
        ),
        ("--capacity-factor inf", 1, "--capacity-factor inf is not a finite number: give one"),
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
            "--routing trace:nowhere.pt does not exist: give a routing trace, which moe-opt trace record or generate "
            "makes, or an .npz or .pt with one array of integers [tokens, topk]",
        ),
        (
            "--output nowhere/out.json",
            1,
            "--output nowhere/out.json: its folder does not exist; create it or choose another",
        ),
        ("--output .", 1, "--output . is a folder: name a file in it"),
        (
            "-o /proc/out.json",
            1,
            "--output /proc/out.json cannot be written (No such file or directory): choose another file",
        ),
    ],
)
def test_bench_layer_refuses(monkeypatch, capsys, arguments, world, sentence):
    assert _run(monkeypatch, "bench", *arguments.split(), world=world) == 2
    assert capsys.readouterr().err == f"moe-opt: {sentence}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            f"saa --sizes {'9' * 5000}",
            f"--sizes {'9' * 5000}: write numbers from 1 to 2147483647, separated by commas, such as 256,1024",
        ),
        (
            "saa --tp 1 --ep 2",
            "--tp 1 --ep 2: an AllGather over TP can overlap with an all-to-all where both are above 1",
        ),
        ("saa --tp 3", "--tp 3 x --cp 1 = 3 does not divide the 2 ranks of this run: choose sizes whose product does"),
        ("saa --sizes 0", "--sizes 0: write numbers from 1 to 2147483647, separated by commas, such as 256,1024"),
        (
            "choice --profile f --capacity-factor 1.2",
            "--capacity-factor is for whole layers: add --replicated, or leave it out",
        ),
    ],
)
def test_other_benchmarks_refuse(monkeypatch, capsys, arguments, sentence):
    benchmark, *options = arguments.split()
    commands = {"saa": saa.app, "choice": choice.app}[benchmark]
    assert _run(monkeypatch, *options, world=2, commands=commands) == 2
    assert capsys.readouterr().err == f"moe-opt: {sentence}\n"


def test_one_rank_of_a_node_speaks(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _run(monkeypatch, "bench", "--topk", "9") == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [(app, "bench"), (choice.app, "--profile", "f")], ids=["bench", "choice"])
def test_benchmarks_take_the_ranks_of_srun(monkeypatch, capsys, command):
    """Which have no address to meet at here."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "")  # set here, so that it is taken back after the test
    for name, value in (("STEP_NUM_TASKS", "2"), ("PROCID", "0"), ("LOCALID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert _run(monkeypatch, *command[1:], commands=command[0]) == 2
    assert capsys.readouterr().err.startswith("moe-opt: MASTER_ADDR is not set: export the first node's host name")


def test_stale_extension_is_one_sentence(monkeypatch, capsys):
    def stale(options=None):
        raise ExtensionError("The compiled extension of megatron-moe-opt is missing: build it with X.")

    monkeypatch.setattr("megatron_moe_opt.register", stale)
    assert _run(monkeypatch, "bench") == 2
    assert (
        capsys.readouterr().err == "moe-opt: The compiled extension of megatron-moe-opt is missing: build it with X.\n"
    )


PLANNED = (
    "plan --cluster pcie --world 8 --sequence 8 --model hidden=8,ffn=8,experts=1,topk=1,layers=1,heads=1,vocabulary=8"
)


def test_without_the_extension():
    """Commands that need it say so in one sentence; the others work."""
    needing = ["bench", "profile", "timeline -o f.json"]
    code = f"""
import sys
sys.modules["megatron_moe_opt._C"] = None
from megatron_moe_opt.cli.main import main
for command in {["--help", PLANNED, "doctor", *needing]!r}:
    sys.argv = ["moe-opt", *command.split()]
    try:
        main()
    except SystemExit as end:
        print("exit code", end.code, file=sys.stderr)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    lines = run.stderr.splitlines()
    assert lines[:3] == ["exit code 0", "exit code 0", "exit code 1"], run.stderr
    assert "moe-opt doctor" in run.stdout and "mend extension" in run.stdout
    for sentence, end in zip(lines[3::2], lines[4::2], strict=True):
        assert sentence.startswith("moe-opt: The compiled extension of megatron-moe-opt is missing: build it with")
        assert end == "exit code 2"
    assert len(lines) == 3 + 2 * len(needing)


def _failed_layer():
    try:
        torch.empty(2**50)
    except RuntimeError as error:
        raise LayerError("MoE layer 1 failed") from error


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**50),
        lambda: torch.empty(2**40, 2**40),
        lambda: torch.empty(10**22),
        lambda: np.empty(2**59),
        lambda: np.empty((2**40, 2**40)),
        lambda: np.empty(10**22),
        lambda: bytearray(2**62),
        _failed_layer,
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_sizes_beyond_memory(monkeypatch, capsys, allocate, rank):
    monkeypatch.setenv("LOCAL_RANK", rank)
    program = typer.Typer()
    program.command()(lambda: allocate() and None)
    assert _run(monkeypatch, commands=program) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"moe-opt: this takes more memory than there is \(.+\): choose smaller sizes\n", said)


def test_a_routing_trace_beyond_memory(monkeypatch, capsys, tmp_path):
    file = tmp_path / "routing.npz"
    assert _run(monkeypatch, "trace", "generate", "-o", str(file), "--passes", "999999999999") == 2
    assert "more memory than there is (Unable to allocate 931. PiB for an array" in capsys.readouterr().err
    assert not file.exists()


def test_other_errors_keep_their_traceback(monkeypatch):
    program = typer.Typer()
    program.command()(lambda: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["moe-opt"])
    with pytest.raises(ZeroDivisionError):
        main(program)


@pytest.mark.parametrize("arguments", ["bench --topk two", "bench --tokens 0", "bench nothing"])
def test_malformed_options(monkeypatch, capsys, arguments):
    assert _run(monkeypatch, *arguments.split()) == 2
    assert "Error" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "profile --seconds",
        "bench --capacity-factor",
        *(f"plan --{name}" for name in ("imbalance", "placement-saving")),
    ],
)
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_numbers_that_are_none(monkeypatch, capsys, arguments, number):
    """Whether a range or our own check refuses them, the option is named."""
    assert _run(monkeypatch, *arguments.split(), number) == 2
    assert arguments.split()[-1] in capsys.readouterr().err


def test_bench_layer_in_one_process(tmp_path):
    """The whole command without torchrun: table on standard output, everything in the JSON file."""
    file = tmp_path / "bench.json"
    shape = "--tokens 48 --hidden 32 --ffn-hidden 64 --experts 4 --capacity-factor 1.0 --steps 2 --warmup 1"
    command = f"bench --dispatchers monta --seed 7 {shape} --dtype fp32 -o {file}"
    printed = output_of("megatron_moe_opt.cli.main", *command.split())
    for text in (
        "48 tokens a rank, hidden 32, expert hidden 64, 4 experts, top-2, fp32, TP 1, EP 1, expert-TP 1, ",
        "routing uniform, capacity factor 1",
        "seed 7, 1 warm-up and 2 timed rounds, interleaved",
        "1 ranks on 1 node(s), cpu, gloo",
        "links: none between ranks",
        "ratio to alltoall",
    ):
        assert text in printed, printed
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


def test_bench_choice_in_one_process(tmp_path):
    """One rank has no collectives: cutting only costs, and the profile says so."""
    profile, file = tmp_path / "cluster.json", tmp_path / "choice.json"
    Cluster(World((0,)), {(Kind.COPY, None): ((1, 1e-3), (1 << 20, 2e-3))}).save(profile)
    shape = "--tokens 16,48 --chunks 2,4 --hidden 32 --experts 4 --steps 2 --warmup 0"
    printed = output_of("tools.bench.choice", *f"--profile {profile} {shape} -o {file}".split())
    assert "16 tokens a rank, hidden 32, 4 experts, top-2, fp32, TP 1, EP 1, expert-TP 1, routing uniform" in printed
    assert "model: regret at most 5 % in" in printed and "of 2 points" in printed
    assert "judged by the other, the fastest itself: regret at most 5 % in" in printed
    points = json.loads(file.read_text())["points"]
    assert [point["tokens"] for point in points] == [16, 48]
    for point in points:
        assert set(point["seconds"]) == {"alltoall", "monta:O1"} | {
            f"monta:{level}x{count}" for level in ("O2", "O3") for count in (2, 4)
        }
        assert point["chosen"] == "monta:O1"
        assert point["exchanged"] == point["tokens"] * 2 * 32 * 4
        assert point["predicted"] == pytest.approx(4e-3, rel=0.1)
        assert point["ratio"] == point["seconds"]["monta:O1"] / point["seconds"]["alltoall"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--mpmoe --replicated", "--replicated and --mpmoe are choices of different systems: give one of them"),
        ("--reuse S1", "--reuse and --activation-budget are mpmoe's: add --mpmoe, or drop them"),
        ("--mpmoe --reuse S5", "--reuse S5: choose one of none, S1, S2, S3, S4, or auto"),
    ],
)
def test_bench_choice_refuses(monkeypatch, capsys, options, sentence):
    assert _run(monkeypatch, "--profile", "f", *options.split(), commands=choice.app) == 2
    assert sentence in capsys.readouterr().err


def test_bench_executor():
    rows = [line.split("│")[1:-1] for line in output_of("tools.bench.executor", "--repeats", 2).splitlines()]
    table = [[cell.strip() for cell in row] for row in rows if row]
    assert [lanes for lanes, _, _ in table] == ["1", "2", "3"]
    for _, median, spread in table:
        least, largest = spread.split("-")
        assert 0 < float(least) <= float(median) <= float(largest)


@pytest.mark.parametrize("command", [kernels.app, executor.app], ids=["kernels", "executor"])
@pytest.mark.parametrize(
    ("sees_a_gpu", "sentence"),
    [
        (False, "--device cuda: PyTorch sees no CUDA device: use --device cpu"),
        (
            True,
            "--device cuda: the compiled extension has no CUDA kernels: rebuild it with nvcc on PATH, or use --device "
            "cpu",
        ),
    ],
)
def test_benchmarks_without_cuda(monkeypatch, capsys, command, sees_a_gpu, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_a_gpu)
    monkeypatch.setattr("megatron_moe_opt.extension.build_info", lambda: {"backend": "cpu"})
    assert _run(monkeypatch, "--device", "cuda", commands=command) == 2
    assert capsys.readouterr().err == f"moe-opt: {sentence}\n"


def test_bench_kernels_refuses_a_file_before_it_measures(monkeypatch, capsys):
    assert _run(monkeypatch, "-o", "nowhere/out.json", commands=kernels.app) == 2
    error = capsys.readouterr().err
    assert error == "moe-opt: --output nowhere/out.json: its folder does not exist; create it or choose another\n"


def test_bench_kernels_times_permute_rows_in_formats_and_tokens_that_hop():
    workload = kernels.Workload(torch.device("cpu"), 16, 32, 4, 2, "bf16", 1)
    rows = workload.measure(2) + workload.measure_wire(2) + workload.measure_hops(2)
    expected = {"permute", "permute packed, map given", "unpermute, map given", "sum in fp8", "probabilities split off"}
    expected |= {"copies to domains", "rows of experts", "row map cut in 4"}
    assert expected <= {row.op for row in rows}
    assert all(row.ours.median > 0 and row.floor.median > 0 for row in rows)


def test_bench_kernels_says_whether_a_share_of_the_copy_was_reached(capsys):
    def row(op: str, ours: float) -> Row:
        return Row(op, "bf16", 2, Timing(ours, ours, ours), None, Timing(0.9, 0.9, 0.9))

    rows = [row("permute", 1.0), row("unpermute", 1.2), row("round trip", 9.0)]
    assert kernels.reaches(rows, 0.75) and not kernels.reaches(rows, 0.85)
    bar = "permute and unpermute, forward and backward, at"
    assert capsys.readouterr().out.splitlines() == [
        f"{bar} 75% of a plain copy's bandwidth or more: met, at worst 75.0%",
        f"{bar} 85% of a plain copy's bandwidth or more: missed: unpermute, bf16 at 75.0%",
    ]


def test_names_that_look_like_markup_are_printed_as_they_are(capsys):
    table = Table("file of a measured cluster", title="of [b]clusters[/x]")
    table.add_row("[/x].json")
    report_console().print("written to [/x]", table)
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("written to [/x]", "of [b]clusters[/x]", "[/x].json"))
    folder = Path(report_console.__code__.co_filename).parent
    assert [file.name for file in folder.glob("*.py") if " Console(" in file.read_text()] == ["console.py"]


def test_errors_show_what_a_terminal_would_obey():
    error = ConfigurationError("give another than a\x1b[2J\n\udcffé.json")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == r"give another than a\x1b[2J\n\udcffé.json"
