"""Descriptions of known clusters: the curves that follow, and that all predictors find theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.curves import CostCurve
from megatron_moe_opt.planning.costs.described_cluster import describe, levels_of_ep
from megatron_moe_opt.planning.costs.domain_curves import measured_curves, realisable_groups
from megatron_moe_opt.planning.costs.known_clusters import (
    A800_IB200,
    B200_NVL72,
    GB,
    H100_IB400,
    KNOWN_CLUSTERS,
    MB,
    PCIE,
    TWO_DATA_CENTRES,
)
from megatron_moe_opt.planning.planner import candidates
from megatron_moe_opt.planning.predicting import parm
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.training.step_costs import PP_NEIGHBOURS
from megatron_moe_opt.schedules.groups import JOINT_GROUP, TP
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.layouts import Layout

MONTA = Layout(16, tp=8, ep=2, expert_tp=8)
names = st.sampled_from(sorted(KNOWN_CLUSTERS))
powers = st.sampled_from([1, 2, 4, 8])


def workload(known, layout, replicated=False, **others):
    sizes = {"tokens": 4096, "hidden": 2048, "ffn": 1024, "gated": True, "experts": 64, "topk": 4} | others
    return LayerWorkload(
        **sizes, element_bytes=2, lane_bytes=16, ep=layout.ep, etp=layout.expert_tp,
        tp=layout.tp if replicated else 1, workers=levels_of_ep(known, layout), placement_saving=0.3,
    )  # fmt: skip


def test_montas_table_8_and_discussion():
    """The milliseconds of its A800 cluster are those that the paper prints, of which it cuts off the last digit."""
    cluster = describe(A800_IB200, MONTA, 8192, 28672 // 8)
    curves = cluster.costs.curves
    for key, size, milliseconds in (
        ((Kind.ALL_TO_ALL, "ep"), 256 * MB, 6.909),
        ((Kind.ALL_TO_ALL, "ep"), 32 * MB, 1.012),
        ((Kind.ALL_TO_ALL, "ep"), 8 * MB, 0.374),
        ((Kind.ALL_GATHER, "expert-tp"), 256 * MB, 1.443),
        ((Kind.ALL_GATHER, "expert-tp"), 64 * MB, 0.385),
        ((Kind.REDUCE_SCATTER, "expert-tp"), 64 * MB, 0.385),
        ((Kind.COPY, None), 64 * MB, 0.05),
    ):
        assert curves[key].seconds(size) * 1e3 == pytest.approx(milliseconds, abs=1.1e-3)
    # At a sequence of 256K, 0.741 of 25 GB/s for half of a GPU's rows, and 0.803 of 200 GB/s for 7 / 8 of a node's.
    exchange, gather = 1024 * MB / 2 / (25 * GB * 0.741), 8192 * MB * 7 / 8 / (200 * GB * 0.803)
    assert curves[Kind.ALL_TO_ALL, "ep"].seconds(1024 * MB) == pytest.approx(exchange)
    assert curves[Kind.ALL_GATHER, "expert-tp"].seconds(8192 * MB) == pytest.approx(gather)


@settings(max_examples=12)
@given(names, powers, powers, powers, powers, st.sampled_from([1, 2, 4, 16]), st.booleans())
def test_every_layout_has_every_curve(name, tp, cp, ep, expert_tp, more, replicated):
    known = KNOWN_CLUSTERS[name]
    world = max(tp * cp, ep * expert_tp) * more
    assume(world % (tp * cp) == world % (ep * expert_tp) == world % 16 == 0)
    layout = Layout(world, tp, cp, ep, expert_tp)
    try:
        cluster = describe(known, layout, 2048, 1024)
    except ConfigurationError as error:  # a data centre with a node and a half, EP groups on unequal levels
        assert "--world" in str(error) or "--ep" in str(error)
        return
    costs = cluster.costs
    for role, size, kinds in (
        ("ep", ep, [Kind.ALL_TO_ALL]),
        (JOINT_GROUP, ep * expert_tp, [Kind.ALL_TO_ALL]),
        ("expert-tp", expert_tp, [Kind.ALL_GATHER, Kind.REDUCE_SCATTER]),
        (TP, tp, [Kind.ALL_GATHER, Kind.REDUCE_SCATTER]),
        ("cp", cp, [Kind.ALL_GATHER, Kind.REDUCE_SCATTER]),
    ):
        assert all(((kind, role) in costs.curves) == (size > 1) for kind in kinds)
    workers = levels_of_ep(known, layout)
    wanted = 3 * len(realisable_groups(workers))
    assert len(measured_curves(costs, workers)) == wanted
    assert (cluster.saa is not None) == (tp > 1 and ep * expert_tp > 1)
    found, refused = candidates(workload(known, layout, replicated and tp > 1), cluster)
    assert not [one for one in refused if "no cost curve" in one.reason or "not measured" in one.reason]
    assert all(one.seconds > 0 for one in found)
    if ep > 1 and expert_tp == 1:
        assert any(one.family == "expert-migration" for one in found)


@settings(max_examples=6)
@given(names, st.sampled_from(["inside", "between", "far"]), st.sampled_from([1.5, 4.0, 100.0]))
def test_more_bandwidth_is_never_slower(name, fabric, factor):
    known, layout = KNOWN_CLUSTERS[name], Layout(128, tp=4, ep=8, expert_tp=4)
    assume(getattr(known, fabric) is not None)
    better = replace(
        known, **{fabric: replace(getattr(known, fabric), bandwidth=getattr(known, fabric).bandwidth * factor)}
    )
    one, other = (describe(which, layout, 2048, 1024) for which in (known, better))
    for key, points in one.curves.items():
        assert all(b <= a * (1 + 1e-9) for (_, a), (_, b) in zip(points, other.curves[key], strict=True))
    assert all(b <= a * (1 + 1e-9) for (_, a), (_, b) in zip(one.saa, other.saa, strict=True))


@pytest.mark.parametrize("memory", [1.0, 4.0])
def test_experts_are_bound_by_the_peak_or_by_memory(memory):
    known = replace(A800_IB200, memory_bandwidth=A800_IB200.memory_bandwidth * memory)
    gemm = describe(known, MONTA, 4096, 1024).expert_gemm
    few, many = gemm.points[0], gemm.points[-1]
    speed = known.device.peak_flops * known.device.efficiency
    assert many[1] == pytest.approx(gemm.flops(many[0]) / speed, rel=1e-3)
    assert few[1] > gemm.flops(few[0]) / speed
    assert few[1] == pytest.approx(10e-6 + 2 * 2 * 4096 * 1024 / (0.8 * known.memory_bandwidth))
    assert [seconds for _, seconds in gemm.training] == pytest.approx([3 * seconds for _, seconds in gemm.points])


def test_groups_on_two_levels_wait_for_the_slower():
    """EP 16 on two nodes: of 16 ranks' rows 7 / 16 stay in the node, 8 / 16 leave it."""
    cluster = describe(PCIE, Layout(16, ep=16), 2048, 1024)
    size, (inside, between) = 2**30, (PCIE.inside, PCIE.between)
    shared = between.bandwidth / 8  # one NIC for 8 GPUs, which all send
    slower = size * 8 / 16 / (shared * between.efficiencies[0][1]) + between.first + 7 * between.further
    assert slower > size * 7 / 16 / (inside.bandwidth * inside.efficiencies[0][1])
    assert cluster.costs.curves[Kind.ALL_TO_ALL, "ep"].seconds(size) == pytest.approx(slower)
    assert cluster.world.nodes == (0,) * 8 + (1,) * 8


@pytest.mark.parametrize(
    ("known", "layout", "levels"),
    [
        (A800_IB200, Layout(16, ep=8), (8,)),
        (A800_IB200, MONTA, (2,)),
        (A800_IB200, Layout(64, ep=64), (8, 8)),
        (A800_IB200, Layout(64, tp=4, ep=16, expert_tp=4), (8, 2)),
        (TWO_DATA_CENTRES, Layout(16, ep=16), (2, 8)),
        (TWO_DATA_CENTRES, Layout(64, ep=64), (2, 4, 8)),
        (TWO_DATA_CENTRES, Layout(64, ep=16), (2, 8)),  # two nodes of one data centre
        (A800_IB200, Layout(16), (1,)),
    ],
)
def test_levels(known, layout, levels):
    assert levels_of_ep(known, layout) == levels


def test_two_nodes_of_one_data_centre_do_not_use_the_line_between_them():
    curves = [describe(TWO_DATA_CENTRES, Layout(64, ep=ep), 2048, 1024).costs.curves for ep in (16, 64)]
    within, across = (of[Kind.ALL_TO_ALL, "ep"].seconds(2**28) for of in curves)
    assert across > 20 * within


@pytest.mark.parametrize(
    ("known", "layout", "sentence"),
    [
        (PCIE, Layout(12, ep=4), "--world 12 does not fill nodes of 8 GPUs: choose a multiple of 8"),
        (TWO_DATA_CENTRES, Layout(9), "--world 9 does not fill 2 data centres alike: choose a multiple of 2"),
        (
            PCIE,
            Layout(24, ep=12),
            "--ep 12: its ranks 0, 1, ... 11 lie on nodes of 8 GPUs unevenly: choose a size that fills nodes, or "
            "divides them",
        ),
        (
            PCIE,
            Layout(24, ep=3, expert_tp=4),
            "--ep 3: its ranks 0, 4, ... 8 lie on nodes of 8 GPUs unevenly: choose a size that fills nodes, or divides "
            "them",
        ),
        *(  # some on two nodes of a data centre and others on two data centres; some inside a node and others on two
            (
                known,
                layout,
                f"--ep {layout.ep}: some of its groups lie on other levels of the network than others: choose a size "
                "that fills nodes, or divides them",
            )
            for known, layout in ((TWO_DATA_CENTRES, Layout(48, ep=16)), (H100_IB400, Layout(24, ep=2, expert_tp=3)))
        ),
    ],
)
def test_refuses_ranks_that_do_not_fill_it(known, layout, sentence):
    with pytest.raises(ConfigurationError) as refusal:
        describe(known, layout, 2048, 1024)
    assert str(refusal.value) == sentence


def test_saa_hides_a_gather_behind_the_exchange():
    """It takes longer than the all-to-all that it contains, and no longer than that and the AllGather after it."""
    layout = Layout(16, tp=4, ep=4, expert_tp=4)
    cluster = describe(replace(PCIE, overhead=0.0), layout, 2048, 1024)
    costs = cluster.costs
    for size, seconds in cluster.saa:
        exchange = costs.curves[Kind.ALL_TO_ALL, JOINT_GROUP].seconds(size)
        gather = costs.curves[Kind.ALL_GATHER, TP].seconds(size / layout.expert_tp * layout.tp)
        assert seconds > gather
        assert seconds < exchange + 4 * gather
    assert parm.ParmFits.of(cluster).saa.beta > 0


@pytest.mark.parametrize(
    ("known", "layout", "one_queue"),
    [
        (H100_IB400, Layout(16, ep=8), False),
        (H100_IB400, Layout(16, tp=2, ep=8), True),
        (PCIE, Layout(16, cp=2, ep=8), True),
        (B200_NVL72, Layout(16, tp=2, ep=8), False),
    ],
)
def test_one_queue_is_planned_for_where_megatron_asks_for_it(known, layout, one_queue):
    assert describe(known, layout, 4096, 14336).one_queue is one_queue


def test_stages_are_as_far_apart_as_the_farthest_neighbours():
    """Of 16 stages of 4 GPUs every other pair lies in one node of 8, and the others on two nodes."""
    key = Kind.ALL_GATHER, PP_NEIGHBOURS
    layouts = Layout(64, tp=4, pp=16), Layout(16, tp=8, pp=2)
    several, on_two_nodes = (describe(H100_IB400, layout, 1024, 1024).curves[key] for layout in layouts)
    assert several == on_two_nodes


def test_gradients_go_in_rings_over_all_ranks_that_hold_the_same():
    """Of 64 ranks each of the 8 of a node carries an eighth of what crosses nodes; CP's ranks are among them."""
    size, key = 2**30, (Kind.REDUCE_SCATTER, "dp")
    alone, with_cp = (
        CostCurve(describe(H100_IB400, layout, 1024, 1024).curves[key]).seconds(size)
        for layout in (Layout(64, ep=8), Layout(64, cp=4, ep=8))
    )
    fabric = H100_IB400.between
    carried = CostCurve.from_efficiency(fabric.bandwidth, fabric.efficiencies, 7 / 8 / 8).seconds(size)
    assert alone == with_cp == pytest.approx(carried, rel=0.1)  # NVLink takes a little longer
