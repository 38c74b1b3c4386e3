"""Parm's closed forms, Algorithm 1, and the choice among all that could run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.cluster import Cluster, World
from megatron_moe_opt.planning.costs.curves import AlphaBeta
from megatron_moe_opt.planning.predicting import monta
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.parm import ParmChoice, ParmFits, algorithm_1, choices, choose, predict
from megatron_moe_opt.schedules.parm import JOINT
from megatron_moe_opt.schedules.schedule import Kind, Lane

SIZES = (1, 2**40)  # all sizes are between: the curve is the line
NOTHING = AlphaBeta(0.0, 1e-30)
JOINT_A2A, AG_MP = (Kind.ALL_TO_ALL, JOINT), (Kind.ALL_GATHER, "tp")
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
    """Of a training step, whose backward pass mirrors its forward pass, where rows carry nothing but themselves."""
    assume(ep * etp > 1)
    tokens, layer = parts * 4 * tp, layer_of(tp, ep, etp, capacity_factor=capacity_factor)
    cluster = cluster_of({JOINT_A2A: a2a, AG_MP: gather, COPY: NOTHING}, saa)
    seconds = {one.schedule: one.seconds for one in predict(layer, tokens, cluster, levels=[None])}
    t_d1, t_d2 = ParmFits(a2a, gather, saa).seconds(layer, tokens)
    assert seconds == pytest.approx({"S1": 2 * t_d1, "S2": 2 * t_d2}, rel=1e-9)
    fits = ParmFits.of(cluster)
    assert fits.seconds(layer, tokens) == pytest.approx((t_d1, t_d2), rel=1e-9)
    if abs(t_d1 - t_d2) > 1e-8 * t_d1:
        assert algorithm_1(layer, tokens, fits) == choose(layer, tokens, cluster, levels=[None]).schedule
    assert algorithm_1(layer, tokens, fits) == min(seconds, key=seconds.get)


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


@settings(max_examples=40)
@given(st.integers(0, 10**6), sizes, sizes, sizes, st.sampled_from([None, 0.3, 1.0, 2.4]), st.floats(0, 0.1))
def test_the_choice_is_never_worse_than_a_candidate(tokens, tp, ep, etp, capacity_factor, equal_within):
    layer = layer_of(tp, ep, etp, capacity_factor=capacity_factor)
    found, chosen = predict(layer, tokens, CLUSTER), choose(layer, tokens, CLUSTER)
    assert chosen in found
    least = min(one.seconds for one in found)
    assert chosen.seconds <= least * (1 + 2e-9)
    near = choose(layer, tokens, CLUSTER, equal_within=equal_within)
    assert near.seconds <= least * (1 + equal_within) and near.chunks <= chosen.chunks
    assert choose(layer, tokens, CLUSTER) == chosen


@pytest.mark.parametrize("sizes", [(1, 2, 2), (1, 1, 4), (2, 2, 2), (4, 2, 1), (2, 1, 1)], ids=str)
def test_s1_is_what_monta_and_the_fused_all_to_all_take(sizes):
    """And twice the AllGather: of the output and of the input's gradient."""
    tp, ep, etp = sizes
    layer = replace(layer_of(tp, ep, etp), lane_bytes=16)
    costs, slowdown = CLUSTER.costs(), CLUSTER.slowdown
    passes = monta.training_passes(2 * 4096 // tp, 1024, 1040)
    gathers = 2 * (1e-4 + 2e-10 * 4096 * 1024 + 1e-5) if tp > 1 else 0
    for one in predict(layer, 4096, CLUSTER, schedules=["S1"]):
        if one.level is None:
            alone = [1e-4 + 1e-9 * one.exchanged * etp + 1e-6 + 1e-11 * one.exchanged * etp + 2e-5 for one in passes]
            assert one.seconds == pytest.approx(sum(alone) + gathers)
            assert one.chunks == 1
        else:
            played = monta.choose(passes, ep, etp, costs, slowdown, levels=[one.level], chunks=[one.chunks])
            assert one.seconds == pytest.approx(played.seconds + gathers)


def names(layer, **arguments):
    return [str(one) for one in predict(layer, 1024, CLUSTER, **arguments)]


def test_what_can_run():
    piped = [f"S1, {level} in {count} chunks" for level in ("O2", "O3") for count in (2, 4, 8, 16)]
    assert names(layer_of()) == ["S1, fused", "S1, O1", *piped, "S2"]
    assert names(layer_of(tp=1)) == ["S1, fused", "S1, O1", *piped]  # nothing to gather
    assert names(layer_of(ep=1, etp=1)) == ["S1, O1", *piped]  # nothing to send
    assert names(layer_of(), schedules=["S2"]) == ["S2"]
    assert names(layer_of(), levels=[None]) == ["S1, fused", "S2"]
    assert names(layer_of(), levels=["O3"], chunks=[1, 3], schedules=["S1"]) == ["S1, O3", "S1, O3 in 3 chunks"]
    for layer, arguments in ((layer_of(tp=1), {"schedules": ["S2"]}), (layer_of(), {"schedules": []})):
        with pytest.raises(ValueError, match="none of .* can run in a layer LayerWorkload"):
            predict(layer, 1024, CLUSTER, **arguments)


def test_of_equal_times_fewer_chunks_then_the_earlier():
    """Whole experts: the fused all-to-all is MoNTA's of one chunk, and chunks cost latency."""
    cluster = replace(CLUSTER, curves=CLUSTER.curves | {JOINT_A2A: CLUSTER.curves[EP_A2A]}, slowdown={})
    layer = layer_of(tp=1, etp=1)
    fused, piped, *_ = predict(layer, 16, cluster)
    assert fused.seconds == pytest.approx(piped.seconds, rel=1e-12) and piped.level == "O1"
    assert choose(layer, 16, cluster) == fused
    same = AlphaBeta(1e-3, 1e-30)  # S1: 4 all-to-alls, 2 gathers; S2: 2 and 2 of all-to-all and gather at once
    flat = cluster_of({JOINT_A2A: same, AG_MP: same, COPY: NOTHING}, AlphaBeta(2e-3, 1e-30))
    assert choose(layer_of(), 16, flat, levels=[None]).schedule == "S1"


def test_bytes_and_latency_decide():
    """Many shards and slow links between nodes: MoNTA's levels; a flat network and few rows: the fused all-to-all."""
    inside = cluster_of(dict.fromkeys((ETP_AG, ETP_RS), AlphaBeta(1e-5, 1e-11)))
    deep = replace(CLUSTER, curves={**CLUSTER.curves, **inside.curves})
    assert choose(layer_of(tp=1, etp=4), 65536, deep).level in ("O2", "O3")
    assert choose(layer_of(tp=1, etp=4), 16, CLUSTER).level is None
    assert choose(layer_of(etp=1, capacity_factor=0.05), 65536, CLUSTER, levels=[None]).schedule == "S2"


def test_a_table_of_choices():
    table = choices(layer_of(), CLUSTER)
    for tokens in (0, 1, 100, 10_000):
        span = table.range_of(tokens)
        middle = math.isqrt(span.start * span[-1])
        assert table[tokens] == choose(layer_of(), middle, CLUSTER, **monta.AS_IN_TRAINING)
    assert choices(layer_of(), CLUSTER, schedules=["S2"])[100].schedule == "S2"


def test_clusters_without_the_curves():
    old = replace(CLUSTER, curves={key: points for key, points in CLUSTER.curves.items() if key != JOINT_A2A}, saa=None)
    sentence = r"^no cost curve for all_to_all in group ep x expert-tp \(there are: .*\); measure one with moe-opt"
    for use in (lambda: choose(layer_of(), 16, old), lambda: ParmFits.of(old)):
        with pytest.raises(ConfigurationError, match=sentence):
            use()
    for use in (
        lambda: choose(layer_of(), 16, replace(CLUSTER, saa=None)),
        lambda: ParmFits.of(replace(CLUSTER, saa=None)),
    ):
        with pytest.raises(ConfigurationError, match=r"\(SAA\) was not measured: measure this cluster with moe-opt"):
            use()
    assert choose(layer_of(), 16, replace(CLUSTER, saa=None), schedules=["S1"]).schedule == "S1"


def test_names():
    assert str(ParmChoice("S1", None, 1, 0.0)) == "S1, fused"
    assert str(ParmChoice("S2", None, 1, 0.0)) == "S2"
