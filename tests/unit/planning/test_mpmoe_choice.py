"""MPMoE's choice by simulation: the paper's paradigms as special cases of its schedules, and the least of all."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.choosing.choice import choices, choose, schedule_seconds, with_rows
from megatron_moe_opt.planning.choosing.equal_times import EQUAL_WITHIN
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.planning.costs.expert_costs import costs_with_experts
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.partitioned_rows import activation_bytes
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules import mpmoe
from megatron_moe_opt.schedules.memory_reuse import STRATEGIES
from megatron_moe_opt.schedules.mpmoe import PARTITIONS
from megatron_moe_opt.schedules.partition_rows import PartitionRows, RowBytes
from megatron_moe_opt.schedules.schedule import Kind, Lane
from megatron_moe_opt.systems.mpmoe import MPMOE
from tests.unit.mpmoe_paradigms import paradigm_1, paradigm_2, paradigm_3, paradigm_seconds

seconds = st.integers(1, 1000).map(float)
partitions = st.integers(1, 8)
GB = 10**9
LINE = ((1, 1e-4), (GB, 1 + 1e-4))  # 0.1 ms, and 1 GB/s beyond it
FAST = ((1, 1e-6), (GB, 0.01))
KINDS = [(Kind.ALL_TO_ALL, "ep"), (Kind.ALL_GATHER, "expert-tp"), (Kind.REDUCE_SCATTER, "expert-tp")]
CLUSTER = Cluster(
    World((0, 0, 1, 1), tp=2, ep=2, expert_tp=2),
    dict.fromkeys(KINDS, LINE) | {(Kind.COPY, None): FAST, (Kind.OFFLOAD, None): LINE, (Kind.PREFETCH, None): LINE},
    {(Lane.INTER, Lane.COMPUTE): 0.8, (Lane.COMPUTE, Lane.INTER): 0.9, (Lane.INTER, Lane.COMPUTE, Lane.D2H): 0.6},
    overhead=1e-5,
    expert_gemm=ExpertGemm(64, 128, "fp32", ((16, 1e-4), (1600, 4e-3)), ((16, 2.5e-4), (1600, 13e-3))),
)
LAYER = LayerWorkload(0, 64, 128, False, 4, 2, 4, 16, 2, 2, fused=True)  # T_M: 1024 bytes a row


def _played(schedule, of_kind):
    """Where only some kinds of ops take time."""
    return simulate(schedule, lambda op: of_kind.get((op.kind, op.lane), 0.0)).seconds


@given(partitions, seconds, seconds, seconds, st.sampled_from(sorted(STRATEGIES)))
def test_paradigm_1_is_the_pipeline_where_nothing_is_copied(n, send, compute, gradient, strategy):
    """Fig. 8a, by the schedules that run: forward and, where nothing is restored, backward."""
    parts, row = [PartitionRows(1, 1)] * n, RowBytes(1, 1, 1)
    comm, comp = (Kind.ALL_TO_ALL, Lane.INTER), (Kind.COMPUTE, Lane.COMPUTE)
    forward = _played(mpmoe.forward(strategy, parts, row, mpmoe.by_rows(2, 1)), {comm: send, comp: compute})
    assert forward == pytest.approx(paradigm_seconds(paradigm_1(n, send, compute, send)))
    times = {comm: send, (Kind.GRADIENT, Lane.COMPUTE): gradient}
    if strategy in ("none", "S1", "S3"):
        backward = _played(mpmoe.backward(strategy, parts, row, mpmoe.by_rows(2, 1)), times)
        assert backward == pytest.approx(paradigm_seconds(paradigm_1(n, send, gradient, send)))
    else:  # S stands for two all-to-alls: inputs again, and gradients
        backward = _played(mpmoe.backward(strategy, parts, row, mpmoe.by_rows(2, 1)), times)
        assert backward == pytest.approx(paradigm_seconds(paradigm_1(n, 2 * send, gradient, send)))


@pytest.mark.parametrize(
    ("strategy", "copies", "sends", "again"), [("S1", 2, 1, False), ("S2", 1, 2, False), ("S3", 1, 1, True)]
)
@given(n=partitions, send=seconds, compute=seconds, gradient=seconds, transfer=seconds)
def test_paradigms_2_and_3_bound_what_offloads(strategy, copies, sends, again, n, send, compute, gradient, transfer):
    """Fig. 8b and c: it takes no longer than in phases. Copies of T_DI run beside the experts that read the same rows,
    those of T_M beside the next partition's.

    Args:
        copies: of T_DI and T_M, which M stands for.
        sends: in backward, which S stands for.
    """
    parts, row = [PartitionRows(1, 1)] * n, RowBytes(1, 1, 1)
    comm, comp = (Kind.ALL_TO_ALL, Lane.INTER), (Kind.COMPUTE, Lane.COMPUTE)
    forward = _played(
        mpmoe.forward(strategy, parts, row, mpmoe.by_rows(2, 1)),
        {comm: send, comp: compute, (Kind.OFFLOAD, Lane.D2H): transfer},
    )
    assert forward <= paradigm_seconds(paradigm_2(n, send, compute, send, copies * transfer)) + 1e-6
    times = {comm: send, comp: compute, (Kind.GRADIENT, Lane.COMPUTE): gradient, (Kind.PREFETCH, Lane.H2D): transfer}
    backward = _played(mpmoe.backward(strategy, parts, row, mpmoe.by_rows(2, 1)), times)
    phases = paradigm_3(n, sends * send, again * compute + gradient, send, copies * transfer)
    assert backward <= paradigm_seconds(phases) + 1e-6


def test_experts_cost_what_was_measured_at_the_size_of_a_partition():
    costs = costs_with_experts(LAYER, CLUSTER)
    curve, gradient = costs.curves[Kind.COMPUTE, None], costs.curves[Kind.GRADIENT, None]
    for rows, forward, training in ((16, 1e-4, 2.5e-4), (808, 2.05e-3, (2.5e-4 + 13e-3) / 2)):
        size = 2 * rows * LAYER.row_bytes  # of T_DI, over two experts
        assert curve.seconds(size) == pytest.approx(2 * forward)
        assert gradient.seconds(size) == pytest.approx(2 * (training - forward))
    wide = costs_with_experts(dataclasses.replace(LAYER, hidden=128, gated=True), CLUSTER)
    assert wide.curves[Kind.COMPUTE, None].seconds(32 * 512) == pytest.approx(3 * 2e-4)
    older = dataclasses.replace(CLUSTER, expert_gemm=dataclasses.replace(CLUSTER.expert_gemm, training=None))
    assert costs_with_experts(LAYER, older).curves[Kind.GRADIENT, None].seconds(32 * 256) == pytest.approx(4e-4)
    with pytest.raises(ConfigurationError, match="the profile has no expert"):
        costs_with_experts(LAYER, dataclasses.replace(CLUSTER, expert_gemm=None))


def chosen(rows, cluster=CLUSTER, budget=None):
    return choices([(MPMOE, MPMOE.open_options)], LAYER, cluster, budget)[rows]


@settings(max_examples=15)
@given(st.integers(0, 10**5), st.none() | st.integers(0, 10**9))
def test_the_choice_is_the_fastest_that_fits(rows, budget):
    asked, layer = [(MPMOE, MPMOE.open_options)], with_rows(LAYER, rows)
    among = choose(asked, layer, CLUSTER).among
    alone = [f"mpmoe:{n}{chunks}" for chunks in ("", ":c2", ":c4") for n in PARTITIONS]
    sharing = [f"mpmoe:{n}:{strategy}" for strategy in STRATEGIES if strategy != "none" for n in PARTITIONS if n > 1]
    assert [one.variant for one in among] == alone + sharing
    fitting = [one for one in among if budget is None or one.activation_bytes <= budget]
    if not fitting:
        with pytest.raises(ConfigurationError, match=f"--moe-opt-activation-budget {budget} is too little"):
            choose(asked, layer, CLUSTER, budget)
        return
    choice = choose(asked, layer, CLUSTER, budget).chosen
    least = min(schedule_seconds(one) for one in fitting) * (1 + EQUAL_WITHIN)
    assert choice in fitting and schedule_seconds(choice) <= least
    assert choice.parts == min(one.parts for one in fitting if schedule_seconds(one) <= least)
    assert budget is not None or choice.variant.count(":") == 1  # strategies only add work


def test_activations_are_those_of_the_paper():
    """Eq. 2 and eq. 5 with k rows a token, in bytes, where no size is rounded; S1 and S2 have another T_M."""
    layer = LayerWorkload(0, 16, 32, False, 4, 2, 4, 16, 4, fused=True)
    rows, widths = 840, {"T_I": 64, "T_DI": 64, "T_M": 128, "activations": 128, "T_DO": 64, "T_O": 64}
    for n in PARTITIONS:
        for strategy in STRATEGIES:
            shared = {"T_DI": 2, "T_DO": 2, "T_M": 1 + (strategy in ("S1", "S2")), "activations": 1}
            kept = shared if strategy != "none" else {}
            expected = sum(rows * width * min(n, kept.get(name, n)) // n for name, width in widths.items())
            assert activation_bytes(layer, rows, n, strategy) == expected


def test_more_to_hide_means_more_partitions_and_little_means_none():
    counts = [chosen(rows).chosen.parts for rows in (1, 100, 10**4, 10**5)]
    assert counts[0] == 1 and counts[-1] > 2 and counts == sorted(counts)
    tight = chosen(10**4, budget=activation_bytes(LAYER, 10**4, 4, "S3")).chosen
    assert tight.variant.count(":") == 2 and tight.parts >= 4


def test_a_budget_has_to_hold_the_most_rows_that_share_the_choice():
    rows = 10**4
    table = choices([(MPMOE, MPMOE.open_options)], LAYER, CLUSTER)
    most = with_rows(LAYER, table.range_of(rows)[-1]).rows
    least = activation_bytes(LAYER, most, 8, "S3")
    assert chosen(rows, budget=least).chosen.parts == 8
    with pytest.raises(ConfigurationError) as refusal:
        chosen(rows, budget=least - 1)
    said = str(refusal.value)
    assert f"budget {least - 1} is too little for up to {most} rows a rank: mpmoe:8:S" in said
    assert f" takes least, {least} bytes; raise" in said and said.endswith("or train on fewer tokens at once")
