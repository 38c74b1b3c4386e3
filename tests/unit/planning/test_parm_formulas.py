"""Parm's eqs. 1 to 10: on bandwidth alone they hold on all known clusters, and t_B is what the baseline's ops take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_moe_opt.planning.costs.described_cluster import describe
from megatron_moe_opt.planning.costs.known_clusters import H100_IB400, KNOWN_CLUSTERS, MB, PARM_B
from megatron_moe_opt.planning.predicting.baselines import deepspeed
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.schedules.schedule import COLLECTIVES
from megatron_moe_opt.topology.layouts import Layout
from tools.papers.formulas.parm import ROUNDING, Collectives, bandwidth_alone

powers = st.sampled_from([1, 2, 4])


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(KNOWN_CLUSTERS)), powers, powers, st.sampled_from([1, 2, 4, 8, 16]), st.booleans(),
    st.floats(10, 34), st.floats(0.1, 10),
)  # fmt: skip
def test_the_baseline_takes_longest_on_bandwidth_alone(name, n_mp, n_esp, n_ep, ep_in_a_node, power, factor):
    known = KNOWN_CLUSTERS[name]
    assume(known.inside.bandwidth > known.between.bandwidth)  # as section IV does
    gpus = n_ep * n_esp
    assume(gpus > 1 and gpus % n_mp == gpus % known.data_centres == 0)
    n_mp = 1 if ep_in_a_node else n_mp
    cluster = describe(bandwidth_alone(known), Layout(gpus, tp=n_mp, ep=n_ep, expert_tp=n_esp), 1024, 1024)
    sides = Collectives.of(cluster, ep_in_a_node).sides(2**power, factor)
    assert set(sides) == ({"3", "5", "6"} if n_mp == 1 else {"3", "5", "7", "9", "10"})
    for equation, (least, most) in sides.items():
        slack = 0.005 if equation == "9" and known is PARM_B else ROUNDING  # docs/papers/parm.md
        assert least <= most * (1 + slack), equation


@pytest.mark.parametrize(("n_mp", "n_esp"), [(1, 2), (2, 2), (4, 4)])
def test_t_b_is_what_the_baseline_communicates(n_mp, n_esp):
    layout = Layout(32, tp=n_mp, ep=32 // n_esp, expert_tp=n_esp)
    cluster = replace(describe(PARM_B, layout, 1024, 1024, "fp32"), overhead=0.0)
    layer = LayerWorkload(
        4096, 1024, 1024, False, layout.ep, 1, 4, 0, ep=layout.ep, etp=n_esp, tp=n_mp, capacity_factor=1.2
    )
    on = LayerOnCluster(layer, cluster)
    ops = deepspeed(on).timelines[0].schedule.ops
    forward = ops[: len(ops) // 2 + 1]
    waits = sum(on.costs(op) for op in forward if op.kind in COLLECTIVES)
    tokens, rows = layer.tokens * layer.row_bytes, layer.routed_rows(layer.tokens) * layer.row_bytes
    assert Collectives.of(cluster).t_b(tokens, rows) == pytest.approx(waits)


def test_latencies_of_more_peers_fail_eq_3_below_a_size():
    """Four nodes, N_ESP = 4: 24 peers over the network in the place of EP's 6 are 18 us more."""
    one = Collectives.of(describe(H100_IB400, Layout(32, ep=8, expert_tp=4), 1024, 1024))
    size = one.fails_below("3")
    assert 1 * MB < size < 4 * MB
    for factor, fails in ((0.5, True), (0.99, True), (1.01, False), (8.0, False)):
        least, most = one.sides(factor * size)["3"]
        assert (least > most) == fails
    assert (
        Collectives.of(describe(bandwidth_alone(H100_IB400), Layout(32, ep=8, expert_tp=4), 1, 1)).fails_below("3") == 0
    )
