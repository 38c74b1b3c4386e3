"""The papers' baselines as the simulator plays them: their schedules can run, and send what their papers count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.described_cluster import describe, levels_of_ep
from megatron_moe_opt.planning.costs.known_clusters import ADIRA, H100_IB400, PARM_B
from megatron_moe_opt.planning.predicting.baselines import (
    GROUP,
    baselines,
    deepep,
    deepspeed,
    fastermoe,
    fastmoe,
    tutel,
)
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.schedules.memory_reuse import NONE
from megatron_moe_opt.schedules.schedule import COLLECTIVES, Kind
from megatron_moe_opt.systems.expert_migration import EXPERT_MIGRATION
from megatron_moe_opt.systems.mpmoe import candidate
from megatron_moe_opt.topology.layouts import Layout
from tests.schedule_checks import validate


def layer_on(known=ADIRA, world=64, tp=1, etp=1, tokens=8192, **others):
    layout = Layout(world, tp=tp, ep=world // etp, expert_tp=etp)
    work = LayerWorkload(
        tokens, 2048, 8192 // etp, False, layout.ep, 1, 2, 0, ep=layout.ep, etp=etp, tp=tp,
        workers=levels_of_ep(known, layout), **others,
    )  # fmt: skip
    return LayerOnCluster(work, describe(known, layout, 2048, 8192 // etp))


def ops(prediction, *kinds):
    return [op for one in prediction.timelines for op in one.schedule.ops if op.kind in kinds]


def test_all_can_run():
    on = layer_on()
    for prediction in baselines(on):
        for timeline in prediction.timelines[:-1]:
            if prediction.variant != "deepspeed":  # one op after another, without buffers
                validate(timeline.schedule)
    assert [one.variant for one in baselines(layer_on(PARM_B, 32, tp=4, etp=4))] == ["deepspeed"]


@pytest.mark.parametrize(("tp", "etp"), [(2, 2), (4, 4), (4, 2)])
def test_deepspeed_sends_what_parm_counts(tp, etp):
    """docs/parm.md: 2 N_ESP y between nodes, (N_ESP - 1) (B + 2 y) inside them, of B bytes of tokens and y of rows,
    forward; the experts compute N_MP times as much as where tokens are split."""
    on = layer_on(PARM_B, 32, tp, etp, tokens=4096)
    one = on.workload
    n_ep, b = 32 // etp, one.tokens * one.row_bytes
    y = one.routed_rows(one.tokens) * one.row_bytes
    prediction = deepspeed(on)
    forward = prediction.timelines[0].schedule.ops[: len(prediction.timelines[0].schedule.ops) // 2 + 1]
    sent = {
        group: sum(op.size * (1 - 1 / ranks) for op in forward if op.group == group)
        for group, ranks in (("ep", n_ep), ("expert-tp", etp))
    }
    assert sent["ep"] == pytest.approx(2 * etp * y * (n_ep - 1) / n_ep)
    assert sent["expert-tp"] == pytest.approx((etp - 1) * (b + 2 * y))
    (compute,) = ops(prediction, Kind.COMPUTE)
    assert compute.size == y * etp == tp * layer_on(PARM_B, 32, tp, etp, tokens=4096).computed * one.row_bytes * etp


def test_fastmoe_is_one_partition_and_hides_nothing():
    on = layer_on()
    alone = fastmoe(on)
    assert alone.seconds == pytest.approx(candidate(on, 1, NONE).seconds, rel=0.01)
    assert tutel(on).seconds <= alone.seconds
    assert all(timeline.hidden == pytest.approx(0) for timeline in alone.timelines)


def test_fastermoe_sends_each_row_once_and_hides_experts():
    on = layer_on()
    found, whole = fastermoe(on), fastmoe(on)
    sent, at_once = (sum(op.size for op in ops(one, *COLLECTIVES)) for one in (found, whole))
    assert sent == pytest.approx(at_once, rel=1e-3)
    assert found.parts == on.workload.ep // GROUP
    assert found.seconds < whole.seconds
    few = fastermoe(layer_on(world=8, tokens=64))
    assert few.seconds > fastmoe(layer_on(world=8, tokens=64)).seconds  # two groups of a few rows: messages decide
    one_group = replace(layer_on(world=8).workload, experts=4, ep=4, workers=(4,))
    assert fastermoe(LayerOnCluster(one_group, describe(ADIRA, Layout(8, ep=4), 2048, 8192))).parts == 1


def test_deepep_sends_what_hops_send_and_waits_for_the_slowest_level():
    """Its levels work at once, where ours hop over one after the other, and nothing is copied between."""
    on = layer_on(H100_IB400, 32, tokens=4096)
    kernel = deepep(on)
    of_all = EXPERT_MIGRATION.candidates(on, EXPERT_MIGRATION.open_options)
    hops = next(one for one in of_all if one.variant == "expert-migration:1x1")
    assert (kernel.inter_bytes, kernel.intra_bytes) == pytest.approx((hops.inter_bytes, hops.intra_bytes), rel=0.01)
    of_levels = [
        one.end - one.start for timeline in kernel.timelines for one in timeline.spans if one.op.kind in COLLECTIVES
    ]
    assert len(of_levels) == 2 * 4
    slowest = sum(max(of_levels[first : first + 2]) for first in range(0, 8, 2))
    assert kernel.exposed == pytest.approx(slowest) and kernel.seconds < hops.seconds
    assert kernel.exposed < hops.exposed <= sum(of_levels) * (1 + 1e-9)
    with pytest.raises(ConfigurationError, match="experts that are cut"):
        deepep(layer_on(H100_IB400, 32, tp=2, etp=2))
