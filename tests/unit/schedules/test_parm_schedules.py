"""Parm's builders: schedules that validate, and what overlapping the AllGather with the all-to-all takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.groups import EXPERT_TP, JOINT_GROUP, TP
from megatron_moe_opt.schedules.monta import ChunkBytes
from megatron_moe_opt.schedules.parm import combine_and_gather, outline
from megatron_moe_opt.schedules.schedule import Kind, Lane
from tests.schedule_checks import validate, validate_ranks

sizes = st.sampled_from([1, 2, 4])
many_bytes = st.integers(0, 10**9)
chunk_lists = st.lists(st.builds(ChunkBytes, many_bytes, many_bytes), min_size=1, max_size=8)


@given(chunk_lists, sizes, many_bytes)
def test_all_validate(chunks, etp_size, gathered):
    for direction in ("dispatch", "combine"):
        schedule = outline(direction, len(chunks), etp_size).sized(chunks)
        validate(schedule)
        assert (
            sum(op.size for op in schedule.ops if op.group == JOINT_GROUP)
            == sum(c.exchanged for c in chunks) * etp_size
        )
    validate(combine_and_gather(gathered, chunks, etp_size))


@given(st.integers(1, 8), sizes, st.data())
def test_ranks_agree_whatever_they_have(num_phases, etp_size, data):
    phases = st.lists(st.builds(ChunkBytes, many_bytes, many_bytes), min_size=num_phases, max_size=num_phases)
    schedules = {rank: combine_and_gather(0, data.draw(phases), etp_size) for rank in range(3)}
    validate_ranks(schedules, dict.fromkeys((JOINT_GROUP, TP, EXPERT_TP), [[0, 1, 2]]))


@given(st.integers(1, 8), sizes, st.integers(1, 10**6))
def test_every_phase_is_gathered_when_it_has_come(num_phases, etp_size, size):
    ops = combine_and_gather(0, [ChunkBytes(size, 4 * size)] * num_phases, etp_size).ops
    gathers = [op for op in ops if op.kind is Kind.ALL_GATHER]
    assert [op.chunk for op in gathers] == list(range(num_phases))
    for gather in gathers:
        (before,) = gather.waits_for
        assert ops[before].writes == gather.reads == (f"summed.{gather.chunk}",) and gather.size == 4 * size
    over_joint = [op for op in ops if op.group == JOINT_GROUP]
    assert sum(op.size for op in over_joint) == pytest.approx(num_phases * size * etp_size, abs=num_phases)
    # Only the rows of other ranks' experts cross, unless all come at once.
    assert [op.chunk for op in over_joint] == ([0] if num_phases == 1 else list(range(1, num_phases)))
    assert sum(op.group == EXPERT_TP for op in ops) == (num_phases > 1 and etp_size > 1)


@given(st.integers(2, 8), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_shorter_lane_hides_behind_the_longer(num_phases, all_to_all, all_gather):
    """Experts are whole: all-to-alls of the other ranks' rows one after another, all-gathers as their rows come."""
    seconds = {Kind.ALL_TO_ALL: all_to_all, Kind.ALL_GATHER: all_gather, Kind.SUM: 0.0, Kind.COPY: 0.0}
    schedule = combine_and_gather(0, [ChunkBytes(1, 1)] * num_phases, 1)
    assert schedule.lanes == (Lane.INTER, Lane.INTRA, Lane.COPY)
    took = simulate(schedule, lambda op: seconds[op.kind]).seconds
    assert took == pytest.approx(max((num_phases - 1) * all_to_all + all_gather, num_phases * all_gather))
