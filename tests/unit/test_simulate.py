"""`moe-opt simulate` as a user runs it: numbers worked out by hand, a measured cluster, files, refusals."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from megatron_moe_opt.cli.main import main
from megatron_moe_opt.planning import mpmoe_choice, parm
from megatron_moe_opt.planning.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.planning.monta import AS_IN_TRAINING, PASSES, choose, training_passes
from megatron_moe_opt.planning.mpmoe_choice import MpmoeLayer
from megatron_moe_opt.planning.partition_search import PARTITIONS
from megatron_moe_opt.schedules.mpmoe import RowBytes
from megatron_moe_opt.schedules.parm import JOINT
from megatron_moe_opt.schedules.schedule import Kind, Lane

# 1000 rows of 1024 bytes; 1040 with their probability.
MODEL = "--tokens 500 --topk 2 --hidden 512 --ffn-hidden 1024 --experts 8 --layers 4 --heads 8 --vocabulary 1000"
GPU = "--peak-tflops 100 --gemm-efficiency 0.5"
BANDWIDTHS = "--inter-bandwidth 1 --intra-bandwidth 4 --copy-bandwidth 8"
CLUSTER = Cluster(
    World((0, 0, 1, 1), tp=2, ep=2, expert_tp=2),
    {
        (Kind.ALL_TO_ALL, "ep"): ((1 << 16, 2e-3), (1 << 20, 1.1e-2)),
        (Kind.ALL_GATHER, "expert-tp"): ((1 << 16, 1e-4), (1 << 20, 4e-3)),
        (Kind.REDUCE_SCATTER, "expert-tp"): ((1 << 16, 1e-4), (1 << 20, 6e-3)),
        (Kind.COPY, None): ((1 << 16, 1e-5), (1 << 20, 1e-3)),
    },
    {(Lane.INTER, Lane.INTRA): 0.9, (Lane.INTRA, Lane.INTER): 0.8},
)


@pytest.fixture
def run(monkeypatch, capsys):
    """Output and exit code of `moe-opt simulate ARGUMENTS`."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(
            sys, "argv", ["moe-opt", "simulate", *(word for text in arguments for word in text.split())]
        )
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return run


def table_rows(output):
    """The cells of all rows of the printed tables, without their first, by the first."""
    rows = {}
    for line in output.splitlines():
        if line.startswith("│"):
            name, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            rows.setdefault(name, []).append(cells)
    return rows


def test_times_worked_out_by_hand(run):
    code, output, _ = run(MODEL, GPU, BANDWIDTHS, "--ep 2 --expert-tp 4")
    assert code == 0
    rows = table_rows(output)
    assert len(rows) == 1 + 2 * 4  # O1; O2 and O3 with 2 chunks and more
    # Two passes of 1040 bytes a row and two of 1024, with 4 peers' rows in the group: in ms
    exchange, gather, copy = (
        2 * sum(1000 * row * peers * crossing / rate for row in (1040, 1024)) / 1e6
        for peers, crossing, rate in ((1, 1 / 2, 1), (4, 3 / 4, 4), (4, 1, 8))
    )
    total = exchange + gather + copy
    assert rows["O1"][0][:4] == [f"{total:.3f}", "100%", f"{exchange + gather:.3f}", "0.000"]
    # In lanes of their own the gathers last longest, and all but one exchange of a pass run beside them.
    piped, exposed = total / 4 + 3 / 4 * gather, exchange / 4 + gather
    assert rows["O3, 4 chunks"][0][:4] == [
        f"{piped:.3f}",
        f"{piped / total:.0%}",
        f"{exposed:.3f}",
        f"{total - piped:.3f}",
    ]
    # Nothing is lost by cutting, so the finest cut is best; its step is printed below, next to that of O1.
    assert [name for name, (cells, *_) in rows.items() if cells[-1] == "chosen"] == ["O3, 16 chunks"]
    assert [name for name, found in rows.items() if len(found) == 2] == ["O1", "O3, 16 chunks"]


def test_a_constant_for_every_op_makes_chunks_cost(run):
    free = table_rows(run(MODEL, GPU, BANDWIDTHS, "--ep 2 --expert-tp 4")[1])
    paid = table_rows(run(MODEL, GPU, BANDWIDTHS, "--ep 2 --expert-tp 4 --op-microseconds 1000")[1])
    assert float(paid["O1"][0][0]) == pytest.approx(float(free["O1"][0][0]) + 4 * 3)
    assert paid["O1"][0][-1] == "chosen"


def test_efficiency_divides_the_bandwidths(run):
    free = table_rows(run(MODEL, GPU, BANDWIDTHS, "--ep 2 --expert-tp 4")[1])
    paid = table_rows(run(MODEL, GPU, BANDWIDTHS, "--ep 2 --expert-tp 4 --bandwidth-efficiency 0.5")[1])
    for name in free:
        assert float(paid[name][0][0]) == pytest.approx(2 * float(free[name][0][0]), abs=2e-3)


def test_a_step_without_exchange_runs_at_the_efficiency_less_the_bubble(run):
    infinite = "--inter-bandwidth 1e12 --intra-bandwidth 1e12 --copy-bandwidth 1e12"
    _, output, _ = run(MODEL, GPU, infinite, "--ep 2 --tp 2 --pp 2 --micro-batches 4 --sequence 250")
    layer, step, tokens, mfu = table_rows(output)["O1"][-1]
    assert mfu == "40.00%"  # 4 micro-batches in 5 turns
    # Of a token in a layer: attention 4 h^2, router 8 h, two SwiGLU experts 6 h f; causal attention over 250 tokens.
    flops = 6 * (4 * 512**2 + 8 * 512 + 6 * 512 * 1024 + 250 * 512)
    logits = 6 * 512 * 1000
    assert layer == f"{500 * flops / 50e12 * 1e3:.3f}"
    assert step == f"{5 * 500 * (2 * flops + logits / 2) / 50e12 * 1e3:.3f}"
    assert float(tokens) == pytest.approx(50e12 * 4 / 5 / (4 * flops + logits), rel=1e-4)


def test_a_measured_cluster(run, tmp_path):
    file = tmp_path / "cluster.json"
    CLUSTER.save(file)
    code, output, _ = run(f"{file}", MODEL, GPU, "--dtype bf16")
    assert code == 0
    assert f"EP 2, expert-TP 2; costs from {file}" in output
    passes = training_passes(1000, 1024, 1040)
    wanted = choose(passes, 2, 2, CLUSTER.costs(), CLUSTER.slowdown, **AS_IN_TRAINING)
    chosen = {name: found[0] for name, found in table_rows(output).items() if found[0][-1] == "chosen"}
    assert list(chosen) == [f"{wanted.level}, {wanted.chunks} chunks"]
    assert list(chosen.values())[0][0] == f"{wanted.seconds * 1e3:.3f}"


WITH_PARM = dataclasses.replace(
    CLUSTER,
    curves={
        **CLUSTER.curves,
        (Kind.ALL_TO_ALL, JOINT): ((1 << 16, 2e-3), (1 << 20, 1.1e-2)),
        (Kind.ALL_GATHER, "tp"): ((1 << 16, 1e-4), (1 << 20, 4e-3)),
    },
    saa=((1 << 16, 3e-3), (1 << 20, 1.5e-2), (1 << 22, 5e-2)),
)


def test_parm_on_a_measured_cluster(run, tmp_path):
    """500 tokens of each rank, 1000 of a TP group."""
    file = tmp_path / "cluster.json"
    WITH_PARM.save(file)
    code, output, _ = run(f"{file}", MODEL, GPU, "--dtype bf16")
    assert code == 0
    rows = table_rows(output)
    layer = parm.ParmLayer(1024, 1040, topk=2, experts=8, tp=2, ep=2, etp=2)
    split = dataclasses.replace(layer, tp=1), 500, WITH_PARM
    whole = layer, 1000, WITH_PARM
    for column, way in ((0, split), (2, whole)):
        chosen = parm.choose(*way, **AS_IN_TRAINING)
        for one in parm.predict(*way):
            assert rows[str(one)][0][column : column + 2] == [
                f"{one.seconds * 1e3:.3f}",
                "chosen" if one == chosen else "",
            ]
    assert rows["S2"][0][:2] == ["-", ""]
    fits = parm.ParmFits.of(WITH_PARM)
    assert rows["SAA"][0] == [
        f"{fits.saa.alpha * 1e3:.4f}",
        f"{fits.saa.beta * 1e9:.4f}",
        f"{fits.saa.r_squared:.4f}",
        f"{fits.saa.largest_error:.1%}",
    ]
    assert fits.saa.largest_error > 0.001  # three points that are on no line
    t_d1, t_d2 = fits.seconds(layer, 1000)
    answer = parm.algorithm_1(layer, 1000, fits)
    assert f"t_D1 {t_d1 * 1e3:.3f} ms, t_D2 {t_d2 * 1e3:.3f} ms: {answer}\n" in output


def test_parm_without_its_measurements(run, tmp_path):
    """A file from before parm, or of another TP size, says so, and is still good for monta."""
    file = tmp_path / "cluster.json"
    CLUSTER.save(file)
    code, output, _ = run(f"{file}", MODEL, GPU)
    assert code == 0 and "parm: no cost curve for all_to_all in group ep x expert-tp" in output
    assert "parm: --tp 4 is not what" in run(f"{file}", MODEL, GPU, "--tp 4")[1]
    assert "parm:" not in run(MODEL, GPU, BANDWIDTHS)[1]


WITH_EXPERT = dataclasses.replace(
    CLUSTER,
    curves={
        **CLUSTER.curves,
        (Kind.OFFLOAD, None): ((1 << 16, 1e-4), (1 << 20, 2e-3)),
        (Kind.PREFETCH, None): ((1 << 16, 1e-4), (1 << 20, 2e-3)),
    },
    expert_gemm=ExpertGemm(512, 512, "bf16", ((16, 1e-4), (1024, 4e-3)), ((16, 3e-4), (1024, 1.2e-2))),
)


@pytest.mark.parametrize("gated", ["--gated", "--no-gated"])
def test_mpmoe_on_a_measured_cluster(run, tmp_path, gated):
    """Experts of 1024 over two ranks save three times 512 elements of a row: with SwiGLU, fused, two halves and their
    product; else the first matrix' output, the activation, and that times the probabilities."""
    file = tmp_path / "cluster.json"
    WITH_EXPERT.save(file)
    code, output, _ = run(f"{file}", MODEL, GPU, "--dtype bf16", gated)
    assert code == 0
    row = RowBytes(packed=1040, token=1024, middle=2 * 3 * 512)
    layer = MpmoeLayer(row, 512, 512, gated == "--gated", local_experts=4, ep=2, etp=2)
    candidates = mpmoe_choice.predict(layer, 1000, WITH_EXPERT)
    rows = table_rows(output)
    for count in PARTITIONS:
        of_count = {one.strategy: one for one in candidates if one.partitions == count}
        held = of_count["none"].activation_bytes, of_count["S4"].activation_bytes
        assert rows[str(count)] == [
            [f"{of_count[strategy].seconds * 1e3:.3f}" for strategy in ("none", "S1", "S2", "S3", "S4")]
            + [f"{size / 1e6:.1f}" for size in held]
        ]
        assert count == 1 or held[1] < held[0]
    assert f"mpmoe, without a budget: {mpmoe_choice.choose(candidates)}\n" in output


def test_mpmoe_without_its_measurements(run, tmp_path):
    """A file from before mpmoe says so, and is still good for monta. Where no row leaves its rank nothing is said."""
    file = tmp_path / "cluster.json"
    CLUSTER.save(file)
    code, output, _ = run(f"{file}", MODEL, GPU)
    assert code == 0 and "mpmoe: the profile has no expert: measure this cluster again" in output
    dataclasses.replace(WITH_EXPERT, curves=CLUSTER.curves).save(file)
    assert "mpmoe: no cost curve for offload" in run(f"{file}", MODEL, GPU)[1]
    dataclasses.replace(WITH_EXPERT, world=World((0, 0, 1, 1))).save(file)
    assert "mpmoe:" not in run(f"{file}", MODEL, GPU)[1] and "mpmoe:" not in run(MODEL, GPU, BANDWIDTHS)[1]


def test_files(run, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    arguments = f"--ep 2 --expert-tp 4 --op-microseconds 20 --trace {trace} --png {picture}"
    code, output, _ = run(MODEL, GPU, BANDWIDTHS, arguments)
    assert code == 0
    assert f"written to {trace}" in output and f"written to {picture}" in output
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    parts = [event for event in events if event.get("cat") == "part"]
    assert [part["name"] for part in parts] == list(PASSES)
    (chosen,) = (name for name, found in table_rows(output).items() if found[0][-1] == "chosen")
    chunks = int(chosen.split()[1])
    ops = [event for event in events if event["ph"] == "X" and event not in parts]
    assert len(ops) == (2 * 3 + 2 * 4) * chunks  # combine has a sum too
    first = [min((op for op in ops if op["ts"] >= part["ts"]), key=lambda op: op["ts"])["cat"] for part in parts]
    assert first == ["all_to_all", "copy", "all_to_all", "copy"]
    predicted = float(table_rows(output)[chosen][0][0])
    assert sum(part["dur"] for part in parts) / 1e3 == pytest.approx(predicted, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "",
            "there are no costs to simulate with: give a cluster.json of moe-opt profile, or --inter-bandwidth, "
            "--intra-bandwidth and --copy-bandwidth",
        ),
        (
            "FILE --copy-bandwidth 3",
            "--copy-bandwidth 3 has no meaning beside FILE, which holds costs: drop one of them",
        ),
        (
            "FILE --ep 4",
            "--ep 4 is not what FILE was measured with (2): measure this layout with moe-opt profile --ep 4 "
            "--expert-tp 2",
        ),
        (f"{BANDWIDTHS} --ep 3", "--ep 3 does not divide --experts 8: choose a divisor"),
        (f"{BANDWIDTHS} --expert-tp 3", "--expert-tp 3 does not divide --ffn-hidden 1024: choose a divisor"),
        (f"{BANDWIDTHS} --tp 3", "--tp 3 does not divide --heads 8: choose a divisor"),
        (f"{BANDWIDTHS} --pp 3", "--pp 3 does not divide --layers 4: choose a divisor"),
        (f"{BANDWIDTHS} --kv-heads 3", "--kv-heads 3 does not divide --heads 8: choose a divisor"),
        (f"{BANDWIDTHS} --topk 9", "--topk 9 is more than --experts 8: choose at most that"),
        (
            f"{BANDWIDTHS} --tp 2 --sequence 300",
            "--sequence 300 does not divide the 1000 tokens of a micro-batch (--tokens x TP x CP): choose a divisor",
        ),
        (f"{BANDWIDTHS} --op-microseconds inf", "--op-microseconds inf is not a finite number: give one"),
        (
            f"{BANDWIDTHS} --trace nowhere/trace.json",
            "--trace nowhere/trace.json: its folder does not exist; create it or choose another",
        ),
        (
            f"{BANDWIDTHS} --png picture.gif",
            "the picture picture.gif has no known format: end its name in .png, .svg, .pdf",
        ),
    ],
)
def test_refusals(run, tmp_path, arguments, sentence):
    file = tmp_path / "cluster.json"
    CLUSTER.save(file)
    code, output, error = run(MODEL, GPU, arguments.replace("FILE", str(file)))
    assert (code, output) == (2, "")
    assert error == f"moe-opt: {sentence.replace('FILE', str(file))}\n"


def test_a_missing_size_is_refused(run):
    code, _, error = run(GPU, BANDWIDTHS)
    assert code == 2 and "--tokens" in error
