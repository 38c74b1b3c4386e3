"""`moe-opt profile` as a user runs it: refusals, one process, ranks of Slurm."""

from __future__ import annotations

import io
import os
from itertools import combinations

import pytest
from rich.console import Console

from megatron_moe_opt.cli.profile.curves_table import curves_table, interference_table
from megatron_moe_opt.cli.ranks import adopt_slurm_ranks
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.bus_bandwidth import bus_of
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.schedules.groups import JOINT_GROUP
from megatron_moe_opt.schedules.schedule import Kind, Lane
from tests.ranks.job import output_of


@pytest.mark.parametrize(
    ("arguments", "world", "sentence"),
    [
        (
            "--tp 3",
            4,
            "--tp 3 x --cp 1 = 3 does not divide the 4 ranks of this run: choose sizes whose product does",
        ),
        (
            "--tp 2 --cp 4",
            4,
            "--tp 2 x --cp 4 = 8 does not divide the 4 ranks of this run: choose sizes whose product does",
        ),
        (
            "--ep 8 --expert-tp 1",
            4,
            "--ep 8 x --expert-tp 1 = 8 does not divide the 4 ranks of this run: choose sizes whose product does",
        ),
        (
            "--expert-tp 2",
            1,
            "--ep 1 x --expert-tp 2 = 2 does not divide the 1 ranks of this run: choose sizes whose product does",
        ),
        ("--expert-tp 2 --ffn-hidden 33", 4, "--expert-tp 2 does not divide --ffn-hidden 33: choose a divisor"),
        (
            "--output nowhere/cluster.json",
            1,
            "--output nowhere/cluster.json: its folder does not exist; create it or choose another",
        ),
        ("--output .", 1, "--output . is a folder: name a file in it"),
        ("--seconds inf", 1, "--seconds inf is not a finite number: give one"),
    ],
)
def test_refusals(command, arguments, world, sentence):
    code, _, errors = command("profile", *arguments.split(), world=world)
    assert code == 2 and errors == f"moe-opt: {sentence}\n"


def test_one_process(tmp_path):
    """The whole command without torchrun: curves of what one rank has, a table, the file."""
    file = tmp_path / "cluster.json"
    command = f"profile --hidden 64 --ffn-hidden 32 --dtype fp32 --seconds 2 -o {file}"
    printed = output_of("megatron_moe_opt.cli.main", *command.split())
    for text in ("Cost curves", "copy", "GB/s", "expert 64 x 32 fp32", "TFLOP/s", f"written to {file}"):
        assert text in printed, printed
    cluster = Cluster.load(file)
    assert cluster.world == World((0,))
    assert set(cluster.curves) == {(Kind.COPY, None), (Kind.OFFLOAD, None), (Kind.PREFETCH, None)}
    lanes = {Lane.COPY, Lane.COMPUTE, Lane.D2H, Lane.H2D}
    assert {frozenset(pair) for pair in cluster.slowdown} == {
        frozenset(pair) for pair in combinations(lanes, 2) if set(pair) != {Lane.D2H, Lane.H2D}
    }
    assert cluster.software["torch"] and cluster.host["backend"] == "gloo"


def test_table():
    gathers = ((1024, 1e-6), (2**20, 5e-4))
    cluster = Cluster(
        World((0, 0), tp=2, expert_tp=2),
        {
            (Kind.ALL_GATHER, "expert-tp"): gathers,
            (Kind.ALL_GATHER, "tp"): gathers,
            (Kind.COPY, None): ((2048, 1e-6),),
            (Kind.SEND_RECEIVE, "intra-node"): ((4096, 1e-6),),
        },
        {(Lane.INTER, Lane.COPY): 0.5, (Lane.COPY, Lane.INTER): 1.0, (Lane.INTER, Lane.COMPUTE, Lane.D2H): 0.25},
        expert_gemm=ExpertGemm(1000, 2500, "bf16", ((100, 1e-3),), ((100, 2e-3),)),
        overhead=2e-4,
        saa=((4096, 1e-5),),
    )
    text, rows = _printed(curves_table(cluster))
    assert rows == [
        ["all_gather expert-tp, tp", "1 KiB", "0.001", "1.024 GB/s", "0.512 GB/s", "12%", "49%"],
        ["", "1 MiB", "0.500", "2.097 GB/s", "1.049 GB/s", "26%", "100%"],
        ["copy", "2 KiB", "0.001", "2.048 GB/s", "", "", "100%"],
        ["send_receive intra-node", "4 KiB", "0.001", "4.096 GB/s", "", "", "100%"],
        ["SAA", "4 KiB", "0.010", "0.410 GB/s", "", "", "100%"],
        ["expert 1000 x 2500 bf16", "100 rows", "1.000", "1.000 TFLOP/s", "", "", "100%"],
        ["expert 1000 x 2500 bf16, forward and backward", "100 rows", "2.000", "1.500 TFLOP/s", "", "", "100%"],
    ]
    assert "An op of a pipeline takes 0.200 ms besides. A rank that computes alone on its node is 1.00 times" in text
    text, rows = _printed(interference_table(cluster))
    assert [row for row in rows if row[0] in ("inter", "copy")] == [
        ["inter", "-", "50%", "-", "-"],
        ["copy", "100%", "-", "-", "-"],
    ]
    assert "Beside several at once: inter beside compute and d2h 25%." in text


def _printed(table):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return " ".join(text.split()), [row for row in rows if row]


@pytest.mark.parametrize(
    ("kind", "group", "ranks", "link", "bandwidth"),
    [
        (Kind.ALL_TO_ALL, "ep", 4, "inter-node", 3.0),
        (Kind.ALL_GATHER, "tp", 2, "intra-node", 2.0),
        (Kind.REDUCE_SCATTER, "dp", 4, "inter-node", 3.0),
        (Kind.ALL_TO_ALL, JOINT_GROUP, 8, "inter-node", 3.5),
        (Kind.ALL_TO_ALL, "tokens of 2 ranks at level 0 of 2x2", 2, "inter-node", 2.0),
        (Kind.ALL_GATHER, "experts of 2 ranks at level 1 of 2x2", 2, "intra-node", 2.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(kind, group, ranks, link, bandwidth):
    """4 bytes in a second, by doc/PERFORMANCE.md: busbw = algbw * (n - 1) / n; two nodes of four ranks."""
    points = ((4, 1.0),)
    sends = {(Kind.SEND_RECEIVE, "inter-node"): ((10, 1.0), (40, 2.0)), (Kind.SEND_RECEIVE, "intra-node"): points}
    world = World((0, 0, 0, 0, 1, 1, 1, 1), tp=2, ep=4, expert_tp=2)
    bus = bus_of(Cluster(world, sends | {(kind, group): points}), kind, group)
    assert (bus.ranks, bus.link, bus.bandwidth(4, 1.0)) == (ranks, link, bandwidth)
    assert bus.peak == {"inter-node": 20.0, "intra-node": 4.0}[link]


def test_what_is_no_collective_has_no_bus_bandwidth():
    cluster = Cluster(World((0, 1), tp=2), {})
    assert bus_of(cluster, Kind.COPY, None) is bus_of(cluster, Kind.ALL_TO_ALL, "unknown") is None
    assert bus_of(cluster, Kind.ALL_TO_ALL, "ep") is None  # one rank


SLURM = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}


@pytest.fixture
def environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *SLURM):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_ranks_that_srun_started(environment):
    for name, value in {**SLURM, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        environment.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # set here, so that they are taken back after the test
        environment.setenv(name, "")
    del os.environ["RANK"]
    adopt_slurm_ranks()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("9", "16", "1")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # one task, with torchrun or alone
        {**SLURM, "RANK": "3"},  # torchrun in a task of srun
    ],
)
def test_other_ranks_are_left_alone(environment, variables):
    for name, value in variables.items():
        environment.setenv(name, value)
    before = dict(os.environ)
    adopt_slurm_ranks()
    assert dict(os.environ) == before


def test_slurm_ranks_that_cannot_find_each_other(environment):
    for name, value in SLURM.items():
        environment.setenv(name, value)
    environment.setenv("LOCAL_RANK", "")  # set here, so that it is taken back after the test
    with pytest.raises(ConfigurationError, match="^MASTER_ADDR is not set: export the first node's host name"):
        adopt_slurm_ranks()
    assert os.environ["LOCAL_RANK"] == "1"  # one rank of a node says it
