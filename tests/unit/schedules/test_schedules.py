"""Schedules: what validation refuses, and MoNTA's builders."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.monta import LEVELS, ChunkBytes, even_chunks, outline
from megatron_moe_opt.schedules.schedule import COLLECTIVES, Kind, Lane, Op, Schedule, ScheduleError
from tests.schedule_checks import validate, validate_ranks
from tests.unit.schedule_cases import schedules

DIRECTIONS = ("dispatch", "combine")
SIZES = (1, 2, 4)

levels = st.sampled_from(LEVELS)
directions = st.sampled_from(DIRECTIONS)
sizes = st.sampled_from(SIZES)
chunk_lists = st.lists(st.builds(ChunkBytes, st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=9)


# Validation


def _schedule(*ops, inputs=("x",)):
    return Schedule("a schedule", ops, inputs)


def _copy(lane=Lane.COPY, waits_for=(), reads=(), writes=()):
    return Op(Kind.COPY, lane, waits_for=waits_for, reads=reads, writes=writes)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (_schedule(_copy(waits_for=(0,))), "op 0 .* waits for op 0, which does not come before it"),
        (_schedule(_copy(waits_for=(1,)), _copy(waits_for=(0,))), "op 0 .* waits for op 1, which does not come before"),
        (_schedule(_copy(), _copy(waits_for=(2,))), "op 1 .* waits for op 2, which does not exist"),
        (_schedule(_copy(waits_for=(-1,))), "waits for op -1, which does not exist"),
        (_schedule(Op(Kind.ALL_TO_ALL, Lane.INTER)), "collectives have a group"),
        (_schedule(Op(Kind.COPY, Lane.COPY, group="ep")), "other ops have none"),
        (
            _schedule(
                Op(Kind.ALL_TO_ALL, Lane.INTER, group="ep"),
                Op(Kind.ALL_TO_ALL, Lane.INTRA, waits_for=(0,), group="ep"),
            ),
            "group ep is used in lane inter too",
        ),
        (_schedule(_copy(reads=("y",))), "op 0 .* reads buffer y, which nothing has written"),
        (_schedule(_copy(reads=("y",)), _copy(writes=("y",))), "op 0 .* reads buffer y"),
        # Read after write, write after read, write after write.
        (_schedule(_copy(writes=("y",)), _copy(Lane.INTER, reads=("y",))), "op 1 .* touches buffer y without waiting"),
        (_schedule(_copy(reads=("x",)), _copy(Lane.INTER, writes=("x",))), "op 1 .* touches buffer x without waiting"),
        (_schedule(_copy(writes=("y",)), _copy(Lane.INTER, writes=("y",))), "op 1 .* touches buffer y without waiting"),
    ],
)
def test_refuses(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        validate(schedule)


@pytest.mark.parametrize(
    "schedule",
    [
        _schedule(),
        _schedule(_copy(reads=("x",), writes=("x",))),  # in place
        _schedule(_copy(reads=("x",)), _copy(Lane.INTER, reads=("x",))),  # two readers
        _schedule(_copy(writes=("y",)), _copy(reads=("y",))),  # the lane keeps the order
        _schedule(  # by way of another op
            _copy(writes=("y",)), _copy(Lane.INTER, waits_for=(0,)), _copy(Lane.INTRA, waits_for=(1,), reads=("y",))
        ),
    ],
)
def test_accepts(schedule):
    validate(schedule)


@given(schedules())
def test_refuses_races_and_nothing_else(schedule):
    """An op that the simulator can start before an earlier op that it conflicts with has ended is a race."""

    def ends_before(earlier, later):
        def cost(op):  # all time goes to the earlier op
            return float(op is schedule.ops[earlier])

        spans = simulate(schedule, cost).spans
        return spans[later].start >= spans[earlier].end

    schedule = replace(schedule, ops=tuple(replace(op, chunk=index) for index, op in enumerate(schedule.ops)))
    races = [
        (earlier, later)
        for later, after in enumerate(schedule.ops)
        for earlier, before in enumerate(schedule.ops[:later])
        if {*before.writes} & {*after.reads, *after.writes} or {*before.reads} & {*after.writes}
        if not ends_before(earlier, later)
    ]
    try:
        validate(schedule)
    except ScheduleError as error:
        assert races, error
    else:
        assert not races


# Validation across ranks


def _exchange(order, group="ep"):
    ops = [Op(Kind.ALL_TO_ALL, Lane.INTER, chunk=chunk, group=group) for chunk in order]
    return Schedule("exchange", tuple(ops))


def test_ranks_of_a_group_must_agree():
    schedules = {0: _exchange([0, 1]), 1: _exchange([0, 1]), 2: _exchange([1, 0]), 3: _exchange([0])}
    validate_ranks(schedules, {"ep": [[0, 1], [2], [3]]})
    validate_ranks(schedules, {"expert-tp": [[0, 1, 2, 3]]})  # nobody uses it
    with pytest.raises(ScheduleError, match="group ep .ranks 0, 2.: rank 2 issues all_to_all 1, all_to_all 0, but"):
        validate_ranks(schedules, {"ep": [[0, 2]]})
    with pytest.raises(ScheduleError, match="rank 3 issues all_to_all 0, but rank 1 all_to_all 0, all_to_all 1"):
        validate_ranks(schedules, {"ep": [[0], [1, 3]]})


def test_ranks_must_agree_on_what_they_call():
    gather = Schedule("gather", (Op(Kind.ALL_GATHER, Lane.INTER, group="ep"),))
    with pytest.raises(ScheduleError, match="rank 1 issues all_gather 0, but rank 0 all_to_all 0"):
        validate_ranks({0: _exchange([0]), 1: gather}, {"ep": [[0, 1]]})
    with pytest.raises(ScheduleError, match="rank 1 issues nothing, but rank 0 all_to_all 0"):
        validate_ranks({0: _exchange([0]), 1: _exchange([])}, {"ep": [[0, 1]]})


@given(directions, levels, st.integers(1, 6), st.data())
def test_ranks_with_other_bytes_agree_and_with_other_chunk_counts_do_not(direction, level, count, data):
    """4 ranks: EP groups (0, 2) and (1, 3), expert-TP groups (0, 1) and (2, 3)."""
    members = {"ep": [(0, 2), (1, 3)], "expert-tp": [(0, 1), (2, 3)]}
    chunks = st.lists(st.builds(ChunkBytes, st.integers(0, 99), st.integers(0, 99)), min_size=count, max_size=count)
    ranks = {rank: outline(direction, level, count, 2, 2).sized(data.draw(chunks)) for rank in range(4)}
    validate_ranks(ranks, members)
    ranks[data.draw(st.sampled_from(range(4)))] = outline(direction, level, count + 1, 2, 2).sized(
        [ChunkBytes()] * (count + 1)
    )
    with pytest.raises(ScheduleError, match="issues"):
        validate_ranks(ranks, members)


# MoNTA's builders


@given(directions, levels, chunk_lists, sizes, sizes)
def test_builders_write_valid_schedules(direction, level, chunks, ep_size, etp_size):
    schedule = outline(direction, level, len(chunks), ep_size, etp_size).sized(chunks)
    validate(schedule)
    assert [op for op in schedule.ops if op.kind not in COLLECTIVES | {Kind.COPY, Kind.SUM}] == []
    assert level in schedule.name and direction in schedule.name


@given(directions, levels, chunk_lists, sizes, sizes)
def test_every_chunk_passes_every_stage_in_order(direction, level, chunks, ep_size, etp_size):
    schedule = outline(direction, level, len(chunks), ep_size, etp_size).sized(chunks)
    stages = {
        "dispatch": [Kind.ALL_TO_ALL, Kind.ALL_GATHER, Kind.COPY],
        "combine": [Kind.COPY, Kind.REDUCE_SCATTER, Kind.SUM, Kind.ALL_TO_ALL],
    }[direction]
    if ep_size == 1:
        stages.remove(Kind.ALL_TO_ALL)
    if etp_size == 1:
        stages = [kind for kind in stages if kind not in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.SUM)]
    spans = simulate(schedule, lambda op: 1.0).spans
    for j, size in enumerate(chunks):
        of_chunk = [(op, span) for op, span in zip(schedule.ops, spans, strict=True) if op.chunk == j]
        assert [op.kind for op, _ in of_chunk] == stages
        for op, _ in of_chunk:
            assert op.size == (size.exchanged if op.kind is Kind.ALL_TO_ALL else size.gathered)
            expected_group = {Kind.ALL_TO_ALL: "ep", Kind.COPY: None, Kind.SUM: None}.get(op.kind, "expert-tp")
            assert op.group == expected_group
        for (before, earlier), (after, later) in zip(of_chunk, of_chunk[1:], strict=False):
            assert set(before.writes) == set(after.reads) - ({f"unsorted.{j}"} if after.kind is Kind.SUM else set())
            assert later.start >= earlier.end


@given(directions, levels, chunk_lists, sizes, sizes)
def test_buffers_lead_from_the_inputs_to_the_outputs(direction, level, chunks, ep_size, etp_size):
    schedule = outline(direction, level, len(chunks), ep_size, etp_size).sized(chunks)
    read = {name for op in schedule.ops for name in op.reads}
    written = Counter(name for op in schedule.ops for name in op.writes)
    source = {"dispatch": "rows", "combine": "sorted"}[direction]
    target = "sorted" if direction == "dispatch" else _last_of_combine(ep_size, etp_size)
    assert set(schedule.inputs) == {f"{source}.{j}" for j in range(len(chunks))}
    assert read - set(written) == set(schedule.inputs)
    assert set(written) - read == {f"{target}.{j}" for j in range(len(chunks))}
    assert set(written.values()) == {1}


def _last_of_combine(ep_size, etp_size):
    if ep_size > 1:
        return "rows"
    return "summed" if etp_size > 1 else "unsorted"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("level", "lanes"),
    [("O2", (Lane.INTER, Lane.INTRA)), ("O3", (Lane.INTER, Lane.INTRA, Lane.COPY))],
)
def test_levels_differ_in_lanes(direction, level, lanes):
    assert outline(direction, level, 3, 2, 2).sized([ChunkBytes(1, 2)] * 3).lanes == lanes


@given(directions, levels, chunk_lists)
def test_without_any_wait_a_pipeline_is_refused(direction, level, chunks):
    """Where stages sit in different lanes, it is the waits that keep them in order."""
    schedule = outline(direction, level, len(chunks), 2, 2).sized(chunks)
    with pytest.raises(ScheduleError, match="without waiting for"):
        validate(replace(schedule, ops=tuple(replace(op, waits_for=()) for op in schedule.ops)))


@pytest.mark.parametrize(
    ("direction", "level", "spans"),
    [
        # Stages of 4 (all-to-all), 2 (all-gather, reduce-scatter with its sum) and 1 (copy) seconds, two chunks.
        ("dispatch", "O2", [(0, 4), (4, 6), (6, 7), (4, 8), (8, 10), (10, 11)]),
        ("dispatch", "O3", [(0, 4), (4, 6), (6, 7), (4, 8), (8, 10), (10, 11)]),
        ("combine", "O2", [(0, 1), (1, 3), (3, 3), (3, 7), (3, 4), (4, 6), (6, 6), (7, 11)]),
        ("combine", "O3", [(0, 1), (1, 3), (3, 3), (3, 7), (1, 2), (3, 5), (5, 5), (7, 11)]),
    ],
)
def test_chunks_overlap_as_in_the_paper_s_figures(direction, level, spans):
    schedule = outline(direction, level, 2, 2, 2).sized([ChunkBytes(1, 2)] * 2)
    seconds = {Kind.ALL_TO_ALL: 4.0, Kind.ALL_GATHER: 2.0, Kind.REDUCE_SCATTER: 2.0, Kind.SUM: 0.0, Kind.COPY: 1.0}
    timeline = simulate(schedule, lambda op: seconds[op.kind])
    by_chunk = sorted(timeline.spans, key=lambda span: span.op.chunk)
    assert [(span.start, span.end) for span in by_chunk] == spans


@given(st.integers(0, 10**9), sizes, st.integers(1, 64))
def test_even_chunks_are_alike_and_less_than_a_byte_too_large(exchanged, etp_size, count):
    chunks = even_chunks(exchanged, etp_size, count)
    assert len(chunks) == count and len(set(chunks)) == 1
    assert 0 <= sum(chunk.exchanged for chunk in chunks) - exchanged < count
    assert chunks[0].gathered == chunks[0].exchanged * etp_size
