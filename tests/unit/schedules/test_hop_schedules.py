"""Hops as schedules: valid, on the lane of their level, and taking what their ops take one after another."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_moe_opt.planning.costs.curves import CostCurve, Costs
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.expert_migration import RENEWED, gathered, returned
from megatron_moe_opt.schedules.groups import EXPERT_TP, tokens_group
from megatron_moe_opt.schedules.hops import HopBytes, HopStages, outline
from megatron_moe_opt.schedules.schedule import Kind, Lane
from tests.schedule_checks import validate, validate_ranks


@pytest.mark.parametrize("direction", ["hop out", "hop back"])
@pytest.mark.parametrize(
    ("level", "levels", "lane"), [(0, 1, Lane.INTER), (0, 2, Lane.INTER), (1, 2, Lane.INTRA), (1, 3, Lane.INTER)]
)
def test_hops(direction, level, levels, lane):
    hop = outline(direction, HopStages(levels, (level,)))
    schedule = hop.sized([HopBytes({level: 1000}, 3000)])
    validate(schedule)
    assert [op.lane for op in schedule.ops if op.kind is Kind.ALL_TO_ALL] == [lane]
    # Ranks whose rows differ in number issue the same collectives.
    validate_ranks({0: schedule, 1: hop.sized([HopBytes({level: 0})])}, {tokens_group(level): [(0, 1)]})
    curves = {
        (Kind.ALL_TO_ALL, tokens_group(level)): CostCurve(((1000, 3.0),)),
        (Kind.PERMUTE, None): CostCurve(((1000, 1.0),)),
    }
    assert simulate(schedule, Costs(curves)).seconds == pytest.approx(7.0)  # rows of experts are moved too


@pytest.mark.parametrize(("direction", "order"), [("hop out", (0, 1)), ("hop back", (1, 0))])
def test_a_hop_begins_when_the_one_before_has_ended(direction, order):
    schedule = outline(direction, HopStages(2, (0, 1))).sized([HopBytes({0: 1000, 1: 1000})])
    validate(schedule)
    assert [op.group for op in schedule.ops if op.group] == [tokens_group(level) for level in order]
    assert simulate(schedule, lambda op: 1.0).seconds == 5.0


@pytest.mark.parametrize("direction", ["hop out", "hop back"])
def test_chunks_are_on_the_links_of_both_levels_at_once(direction):
    chunks = [HopBytes({0: 250, 1: 250}, 250)] * 4
    schedule = outline(direction, HopStages(2, (0, 1)), 4).sized(chunks)
    validate(schedule)
    seconds = {"tokens.0": 3.0, "tokens.1": 2.0, None: 0.0}
    assert simulate(schedule, lambda op: seconds[op.group]).seconds == 4 * 3.0 + 2.0  # and not 4 * (3 + 2)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(
    ("direction", "kinds"),
    [("hop out", {Kind.ALL_GATHER}), ("hop back", {Kind.REDUCE_SCATTER, Kind.SUM})],
)
def test_chunks_meet_over_expert_tp_inside_nodes(direction, kinds, levels):
    chunks = [HopBytes(dict.fromkeys(range(levels), rows), 2 * rows, rows) for rows in (1000, 0, 10)]
    ways = (HopStages(levels, tuple(range(levels)), etp_size=etp_size) for etp_size in (1, 2))
    whole, cut = (outline(direction, way, 3) for way in ways)
    schedule = cut.sized(chunks)
    validate(schedule)
    groups = {tokens_group(level): [(0, 1)] for level in range(levels)} | {EXPERT_TP: [(0, 1)]}
    validate_ranks({0: schedule, 1: cut.sized(chunks[::-1])}, groups)
    added = Counter(op.kind for op in schedule.ops) - Counter(op.kind for op in whole.schedule.ops)
    assert added == dict.fromkeys(kinds, len(chunks))
    assert all(op.lane is Lane.INTRA for op in schedule.ops if op.kind in kinds)


@pytest.mark.parametrize(("build", "kind"), [(gathered, Kind.ALL_GATHER), (returned, Kind.REDUCE_SCATTER)])
def test_experts_travel_level_by_level_beside_the_hops(build, kind):
    schedule = build({0: 1000, 2: 4000})
    validate(schedule)
    assert [(op.kind, op.lane, op.size, op.group) for op in schedule.ops if op.group] == [
        (kind, Lane.EXPERTS, 1000, "experts.0"),
        (kind, Lane.EXPERTS, 4000, "experts.2"),
    ]


@pytest.mark.parametrize(
    ("schedule", "kinds"),
    [
        (gathered({0: 8, 1: 16}), "all_gather all_gather"),
        (gathered({0: 8, 1: 16}, is_coded=True), "encode all_gather all_gather"),
        (returned({1: 16, 0: 8}), "reduce_scatter sum reduce_scatter sum"),
        (returned({1: 16, 0: 8}, is_coded=True), "encode_gradient reduce_scatter decode_gradient " * 2),
        (returned({1: 16, 0: 8}, deferred=16), "sum reduce_scatter sum reduce_scatter sum"),
        (RENEWED.sized([8]), "reduce_scatter sum all_gather"),
    ],
)
def test_what_travels_beside_goes_one_op_after_another(schedule, kinds):
    validate(schedule)
    assert [op.kind.value for op in schedule.ops] == kinds.split()
    assert [op.waits_for for op in schedule.ops] == [(), *((number,) for number in range(len(schedule.ops) - 1))]
    assert schedule.lanes == (Lane.EXPERTS,)
