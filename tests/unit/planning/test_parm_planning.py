"""Parm's closed forms, Algorithm 1, and the choice among all that could run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_moe_opt.dispatchers.parm_schedule import ParmSchedule
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.choosing.choice import ONE_CHUNK, choose, schedule_seconds
from megatron_moe_opt.planning.choosing.equal_times import EQUAL_WITHIN
from megatron_moe_opt.planning.costs.cluster import Cluster, World
from megatron_moe_opt.planning.costs.curves import AlphaBeta
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_passes import training_passes
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.parm import ParmFits, algorithm_1
from megatron_moe_opt.schedules.groups import JOINT_GROUP
from megatron_moe_opt.schedules.schedule import Kind, Lane
from megatron_moe_opt.systems.monta import MONTA
from megatron_moe_opt.systems.parm import PARM

SIZES = (1, 2**40)  # all sizes are between: the curve is the line
NOTHING = AlphaBeta(0.0, 1e-30)
JOINT_A2A, AG_MP = (Kind.ALL_TO_ALL, JOINT_GROUP), (Kind.ALL_GATHER, "tp")
EP_A2A, ETP_AG, ETP_RS = (Kind.ALL_TO_ALL, "ep"), (Kind.ALL_GATHER, "expert-tp"), (Kind.REDUCE_SCATTER, "expert-tp")
COPY = (Kind.COPY, None)


def cluster_of(lines, saa=None, **others):
    points = {key: tuple((size, line.seconds(size)) for size in SIZES) for key, line in lines.items()}
    measured = None if saa is None else tuple((size, saa.seconds(size)) for size in SIZES)
    return Cluster(World((0,)), points, saa=measured, **others)


def layer_of(tp=2, ep=2, etp=2, **others):
    return LayerWorkload(
        0, 256, 64, False, experts=8, topk=2, element_bytes=4, lane_bytes=0, tp=tp, ep=ep, etp=etp, **others
    )


lines = st.builds(AlphaBeta, st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-8))
sizes = st.sampled_from([1, 2, 4])


@given(lines, lines, lines, st.sampled_from([2, 4]), sizes, sizes, st.integers(0, 10**5), st.sampled_from([None, 1, 2]))
def test_closed_forms_are_the_simulator_s(a2a, gather, saa, tp, ep, etp, parts, capacity_factor):
    """They are those of a training step, whose backward pass mirrors its forward pass, where
    rows carry nothing else; but for the sum of the router's gradient, which they leave out.
    """
    assume(ep * etp > 1)
    tokens, layer = parts * 4 * tp, layer_of(tp, ep, etp, capacity_factor=capacity_factor)
    cluster = cluster_of({JOINT_A2A: a2a, AG_MP: gather, COPY: NOTHING}, saa)
    found = PARM.candidates(LayerOnCluster(replace(layer, tokens=tokens), cluster), PARM.open_options)
    seconds = {one.variant.removeprefix("parm:"): schedule_seconds(one) for one in found}
    t_d1, t_d2 = ParmFits(a2a, gather, saa).seconds(layer, tokens)
    router = 2 * gather.seconds(4 * 8 * 256)
    assert seconds == pytest.approx({"S1": 2 * t_d1 + router, "S2": 2 * t_d2}, rel=1e-9)
    fits = ParmFits.of(cluster)
    assert fits.seconds(layer, tokens) == pytest.approx((t_d1, t_d2), rel=1e-9)
    compared = seconds | {"S1": seconds["S1"] - router}
    assert compared[algorithm_1(layer, tokens, fits)] <= min(compared.values()) * (1 + 1e-9)


def test_closed_forms_by_hand():
    """B L M = 1000 KiB; y = 2 * 1000 KiB * 2 (or 2.4 times these tokens), of which a TP rank has half."""
    fits = ParmFits(AlphaBeta(1.0, 1 / 1024), AlphaBeta(10.0, 2 / 1024), AlphaBeta(100.0, 3 / 1024))
    assert fits.seconds(layer_of(), 1000) == pytest.approx((2 * 2001 + 2010, 2001 + 6100))
    assert fits.seconds(layer_of(capacity_factor=1.2), 1000) == pytest.approx((2 * 2401 + 2010, 2401 + 7300))


@pytest.mark.parametrize(("capacity_factor", "rows"), [(None, 34), (1.0, 40), (1.2, 48), (2.4, 88)])
def test_rows_of_17_tokens_for_8_experts(capacity_factor, rows):
    """4.25 rows an expert, which is 5 at capacity 1, 5.1 and so 6 at 1.2."""
    assert layer_of(capacity_factor=capacity_factor).routed_rows(17) == rows


def test_few_rows_want_s2_and_many_s1():
    """The paper's two ends (section IV-B): T -> 0 leaves S1 its AllGather of all tokens, T -> infinity leaves S2 its of
    all rows.
    """
    line = AlphaBeta(1e-5, 1e-9)
    fits = ParmFits(line, line, line)
    few, many = (replace(layer_of(etp=1), capacity_factor=factor) for factor in (0.01, 100))
    assert (algorithm_1(few, 4096, fits), algorithm_1(many, 4096, replace(fits, saa=AlphaBeta(1e-5, 2e-9)))) == (
        "S2",
        "S1",
    )
    assert algorithm_1(few, 0, replace(fits, saa=AlphaBeta(2e-5, 1e-9))) == "S1"  # of equal times, as in the paper


# Measured: chunks trade latency for overlap, the fused all-to-all bytes for latency.
CLUSTER = cluster_of(
    {
        JOINT_A2A: AlphaBeta(1e-4, 1e-9),
        EP_A2A: AlphaBeta(1e-4, 1e-9),
        ETP_AG: AlphaBeta(1e-4, 2e-10),
        ETP_RS: AlphaBeta(1e-4, 3e-10),
        AG_MP: AlphaBeta(1e-4, 2e-10),
        COPY: AlphaBeta(1e-6, 1e-11),
    },
    AlphaBeta(2e-4, 1.1e-9),
    slowdown={(Lane.INTER, Lane.INTRA): 0.8, (Lane.INTRA, Lane.COPY): 0.7},
    overhead=1e-5,
)


def chosen(layer, tokens, cluster=CLUSTER, parm_schedule="auto"):
    """The variant that `parm` chooses, and the seconds of its schedules."""
    asked = [(PARM, replace(PARM.open_options, parm_schedule=parm_schedule)), (MONTA, MONTA.open_options)]
    choice = choose(asked, replace(layer, tokens=tokens), cluster)
    return choice.chosen.variant, schedule_seconds(choice.chosen)


@settings(max_examples=20)
@given(st.integers(0, 10**6), sizes, sizes, sizes, st.sampled_from([None, 0.3, 1.0, 2.4]))
def test_the_choice_is_the_least_of_what_can_run(tokens, tp, ep, etp, capacity_factor):
    layer = replace(layer_of(tp, ep, etp, capacity_factor=capacity_factor), tokens=tokens)
    choice = choose([(PARM, PARM.open_options), (MONTA, MONTA.open_options)], layer, CLUSTER)
    assert choice.chosen in choice.among
    compared = {one.variant: schedule_seconds(one) * (ONE_CHUNK if one.parts == 1 else 1) for one in choice.among}
    least = min(compared.values()) * (1 + EQUAL_WITHIN)
    assert compared[choice.chosen.variant] <= least
    assert choice.chosen.parts == min(one.parts for one in choice.among if compared[one.variant] <= least)


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 2), (4, 2, 1), (2, 1, 2)], ids=str)
def test_s1_is_what_the_fused_all_to_all_takes(sizes):
    """And twice the AllGather, of the output and of the input's gradient; and the sum of the router's gradient."""
    tp, ep, etp = sizes
    layer = replace(layer_of(tp, ep, etp), lane_bytes=16, tokens=4096)
    passes = training_passes(2 * 4096 // tp, 1024, 1040)
    gathers = sum(2 * (1e-4 + 2e-10 * size + 1e-5) for size in (4096 * 1024, 4 * 8 * 256)) if tp > 1 else 0
    (s1, *_) = PARM.candidates(LayerOnCluster(layer, CLUSTER), PARM.open_options)
    alone = [1e-4 + 1e-9 * one.exchanged * etp + 1e-6 + 1e-11 * one.exchanged * etp + 2e-5 for one in passes]
    assert s1.variant == "parm:S1" and schedule_seconds(s1) == pytest.approx(sum(alone) + gathers)


def names(layer, schedule="auto"):
    found = PARM.candidates(
        LayerOnCluster(replace(layer, tokens=1024), CLUSTER), replace(PARM.open_options, parm_schedule=schedule)
    )
    return [one.variant for one in found]


def test_what_can_run():
    assert names(layer_of()) == ["parm:S1", "parm:S2"]
    assert names(layer_of(tp=1)) == ["parm:S1"]  # nothing to gather
    assert names(layer_of(), "S2") == ["parm:S2"]
    assert names(layer_of(), "S1") == ["parm:S1"]
    assert names(layer_of(ep=1, etp=1)) == names(layer_of(tp=1, etp=1)) == ["parm"]  # refused: it is monta:O1's


def test_bytes_and_latency_decide():
    """Many shards and slow links between nodes: MoNTA's levels; a flat network and few rows: the fused all-to-all."""
    assert chosen(layer_of(tp=1, etp=4), 65536)[0].startswith(("monta:O2", "monta:O3"))
    assert chosen(layer_of(tp=1, etp=4), 16)[0] == "parm:S1"
    assert chosen(layer_of(etp=1, capacity_factor=0.05), 65536)[0] == "parm:S2"


def test_clusters_without_the_curves():
    old = replace(CLUSTER, curves={key: points for key, points in CLUSTER.curves.items() if key != JOINT_A2A}, saa=None)
    sentence = r"^no cost curve for all_to_all in group ep x expert-tp \(there are: .*\); measure one with moe-opt"
    for use in (lambda: chosen(layer_of(), 16, old), lambda: ParmFits.of(old)):
        with pytest.raises(ConfigurationError, match=sentence):
            use()
    for use in (
        lambda: chosen(layer_of(), 16, replace(CLUSTER, saa=None)),
        lambda: ParmFits.of(replace(CLUSTER, saa=None)),
    ):
        with pytest.raises(ConfigurationError, match=r"\(SAA\) was not measured: measure this cluster with moe-opt"):
            use()
    assert chosen(layer_of(), 16, replace(CLUSTER, saa=None), "S1")[0] == "parm:S1"


def test_names():
    assert str(ParmSchedule("S1")) == "S1, fused" and str(ParmSchedule("S2")) == "S2"
    assert str(ParmSchedule("S1", "O1")) == "S1, O1" and str(ParmSchedule("S1", "O2", 4)) == "S1, O2 in 4 chunks"
