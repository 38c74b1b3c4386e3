"""The simulator: hand-computed timelines, and what holds of every timeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.predicting.simulator import lane_rate, simulate
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule, ScheduleError
from tests.unit.schedule_cases import schedules

slowdowns = st.dictionaries(
    st.tuples(st.sampled_from(list(Lane)), st.sampled_from(list(Lane))), st.floats(0.1, 1), min_size=1
)


def _compute(lane, seconds, *waits_for):
    return Op(Kind.COMPUTE, lane, size=seconds, waits_for=waits_for)


def _seconds(op):
    return float(op.size)


def _times(timeline):
    return [(span.start, span.end) for span in timeline.spans]


def test_ops_wait_for_their_lane_and_for_what_they_name():
    schedule = Schedule(
        "three lanes",
        (
            _compute(Lane.INTER, 4),
            _compute(Lane.INTRA, 1, 0),
            _compute(Lane.INTER, 2),
            _compute(Lane.INTRA, 5, 2),
            _compute(Lane.COPY, 3),
            _compute(Lane.COPY, 1, 1, 3),
        ),
    )
    timeline = simulate(schedule, _seconds)
    assert _times(timeline) == [(0, 4), (4, 5), (4, 6), (6, 11), (0, 3), (11, 12)]
    assert timeline.seconds == 12
    assert [span.end for span in timeline.lane(Lane.INTRA)] == [5, 11]


def test_on_one_queue_ops_begin_in_turn_and_beside_the_last_kernel_of_half_the_experts():
    """Experts of four kernels of 1 s; a message that is issued halfway through them, or behind them."""
    experts, after = Op(Kind.COMPUTE, Lane.COMPUTE, size=4), Op(Kind.COPY, Lane.COPY, size=1)
    message = Op(Kind.ALL_TO_ALL, Lane.INTER, size=1, group="ep")
    for meanwhile, begins in ((1, 1), (0, 3)):
        schedule = Schedule("experts", (replace(experts, meanwhile=meanwhile), message, after))
        timeline = simulate(schedule, _seconds, one_queue=True)
        assert _times(timeline) == [(0, 4), (begins, begins + 1), (3, 4)]
        assert _times(simulate(schedule, _seconds, {(Lane.INTER, Lane.COPY): 1.0}, True)) == _times(timeline)
        assert _times(simulate(schedule, _seconds)) == [(0, 4), (0, 1), (0, 1)]


EXPERTS = Op(Kind.COMPUTE, Lane.COMPUTE, meanwhile=1)


@pytest.mark.parametrize("behind", [(), (EXPERTS,), (Op(Kind.COPY, Lane.COPY, waits_for=(0,)),)])
def test_what_cannot_be_issued_halfway_is_refused(behind):
    with pytest.raises(ScheduleError, match="1 ops behind it cannot be issued halfway through it"):
        simulate(Schedule("experts", (EXPERTS, *behind)), _seconds)


def test_busy_neighbours_slow_an_op_down_while_they_run():
    # Inter runs at full rate; intra at half beside it, at a quarter of that while copy runs too.
    schedule = Schedule("side by side", (_compute(Lane.INTER, 4), _compute(Lane.INTRA, 3), _compute(Lane.COPY, 2)))
    slowdown = {(Lane.INTRA, Lane.INTER): 0.5, (Lane.INTRA, Lane.COPY): 0.25}
    # intra: 2 s at 1/8, 2 s at 1/2, then the 1.75 s of work left at full rate.
    assert _times(simulate(schedule, _seconds, slowdown)) == [(0, 4), (0, 5.75), (0, 2)]


def test_an_op_that_rounding_has_take_less_than_nothing_ends():
    schedule = Schedule("experts", (Op(Kind.COMPUTE, Lane.COMPUTE), Op(Kind.ALL_TO_ALL, Lane.INTER, group="ep")))
    seconds = {Lane.COMPUTE: -3e-18, Lane.INTER: 1.0}
    played = simulate(schedule, lambda op: seconds[op.lane], {(Lane.COMPUTE, Lane.INTER): 0.5})
    assert played.seconds == pytest.approx(1.0)


def test_a_slowdown_is_of_the_first_lane_only():
    schedule = Schedule("side by side", (_compute(Lane.INTER, 4), _compute(Lane.INTRA, 4)))
    assert _times(simulate(schedule, _seconds, {(Lane.INTER, Lane.INTRA): 0.5})) == [(0, 6), (0, 4)]


def test_lanes_measured_together_count_as_that():
    lanes = Lane.INTER, Lane.COMPUTE, Lane.D2H, Lane.COPY
    slowdown = {(Lane.INTER, Lane.COMPUTE): 0.5, (Lane.INTER, Lane.D2H): 0.5, (Lane.INTER, Lane.COPY): 0.9}
    assert lane_rate(Lane.INTER, lanes[1:], slowdown) == pytest.approx(0.5 * 0.5 * 0.9)
    slowdown |= {(Lane.INTER, Lane.D2H, Lane.COMPUTE): 0.4, (Lane.COMPUTE, Lane.INTER, Lane.D2H): 0.1}
    assert lane_rate(Lane.INTER, lanes[1:], slowdown) == pytest.approx(0.4 * 0.9)  # in any order; copy besides
    assert lane_rate(Lane.INTER, lanes[1:3], slowdown) == 0.4
    assert lane_rate(Lane.INTER, lanes[1:2], slowdown) == 0.5
    assert lane_rate(Lane.D2H, lanes[:2], slowdown) == 1
    schedule = Schedule("together", tuple(_compute(lane, 4) for lane in lanes[:3]))
    # Until 4 d2h runs; then inter has 2.4 s left at 0.5, compute 3.6 s at full rate; then inter has 0.6 s alone.
    ends = [end for _, end in _times(simulate(schedule, _seconds, slowdown))]
    assert ends == pytest.approx([8.2, 7.6, 4])


def test_two_lanes_side_by_side_take_no_longer_than_one_after_the_other():
    """Rates of different ranks, such as 25 and 5 %, are no rates of two lanes that share a rank's processor."""
    slowdown = {(Lane.COMPUTE, Lane.COPY): 0.25, (Lane.COPY, Lane.COMPUTE): 0.05}
    schedule = Schedule("together", (_compute(Lane.COMPUTE, 3), _compute(Lane.COPY, 2)))
    # Five sixths of the processor for 3 s of work, in which copy does 0.6 s of its own.
    assert _times(simulate(schedule, _seconds, slowdown)) == [(0, pytest.approx(3.6)), (0, pytest.approx(5))]
    slowdown[Lane.COPY, Lane.COMPUTE] = 0.75
    assert lane_rate(Lane.COMPUTE, [Lane.COPY], slowdown) == 0.25


def test_a_slower_op_delays_those_behind_it():
    schedule = Schedule(
        "a chain",
        (_compute(Lane.INTER, 2), _compute(Lane.INTRA, 2), _compute(Lane.COPY, 1, 0), _compute(Lane.INTER, 1)),
    )
    timeline = simulate(schedule, _seconds, {(Lane.INTER, Lane.INTRA): 0.5})
    # inter: 1 s of work in 2 s, then alone with copy: 1 s more.
    assert _times(timeline) == [(0, 3), (0, 2), (3, 4), (3, 4)]


@given(schedules())
def test_every_timeline_keeps_order(schedule):
    _check_order(schedule, simulate(schedule, _seconds))


@given(schedules(), slowdowns)
def test_every_disturbed_timeline_keeps_order_and_is_no_faster(schedule, slowdown):
    disturbed = simulate(schedule, _seconds, slowdown)
    _check_order(schedule, disturbed)
    for op, alone, beside in zip(schedule.ops, simulate(schedule, _seconds).spans, disturbed.spans, strict=True):
        assert beside.start >= alone.start - 1e-9
        assert beside.end >= alone.end - 1e-9
        # Never slower than beside all other lanes at once.
        rate = 1.0
        for lane in schedule.lanes:
            rate *= slowdown.get((op.lane, lane), 1.0) if lane is not op.lane else 1.0
        assert beside.end - beside.start <= op.size / rate * (1 + 1e-9) + 1e-9


@given(schedules())
def test_factors_of_one_change_nothing(schedule):
    plain = simulate(schedule, _seconds)
    fluid = simulate(schedule, _seconds, {(Lane.INTER, Lane.INTRA): 1.0})
    assert _times(fluid) == [pytest.approx(times, rel=1e-12) for times in _times(plain)]


@given(schedules(), slowdowns)
def test_the_work_done_is_the_op_s_own(schedule, slowdown):
    """Integrates each op's rate over its span, from the spans alone."""
    timeline = simulate(schedule, _seconds, slowdown)
    instants = sorted({moment for span in timeline.spans for moment in (span.start, span.end)})
    for span in timeline.spans:
        done = 0.0
        for begin, end in zip(instants, instants[1:], strict=False):
            if not (span.start <= begin and end <= span.end):
                continue
            rate = 1.0
            for other in timeline.spans:
                if other.op.lane is not span.op.lane and other.start <= begin and end <= other.end:
                    pair = span.op.lane, other.op.lane
                    both = slowdown.get(pair, 1.0) + slowdown.get(pair[::-1], 1.0)
                    rate *= slowdown.get(pair, 1.0) / min(both, 1.0)
            done += (end - begin) * rate
        assert done == pytest.approx(span.op.size, rel=1e-6, abs=1e-6)


def _check_order(schedule, timeline):
    """Spans do not overlap in a lane, come after what they wait for, and start as soon as both allow."""
    free = {}
    for op, span in zip(schedule.ops, timeline.spans, strict=True):
        earliest = max([free.get(op.lane, 0.0)] + [timeline.spans[other].end for other in op.waits_for])
        assert span.op is op
        assert span.start == pytest.approx(earliest, rel=1e-12)
        assert span.end >= span.start
        free[op.lane] = span.end
    assert timeline.seconds == max([span.end for span in timeline.spans], default=0.0)


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.5])
def test_refuses_factors_that_are_no_rate(factor):
    schedule = Schedule("one", (_compute(Lane.INTER, 1),))
    with pytest.raises(ValueError, match="slowdown of lane intra beside inter"):
        simulate(schedule, _seconds, {(Lane.INTRA, Lane.INTER): factor})


@pytest.mark.parametrize("other", [0, 1, -1])
@pytest.mark.parametrize("slowdown", [None, {(Lane.INTER, Lane.INTRA): 0.5}])
def test_refuses_to_wait_for_what_does_not_come_before(other, slowdown):
    schedule = Schedule("backwards", (_compute(Lane.INTER, 1, other), _compute(Lane.INTRA, 1)))
    with pytest.raises(ScheduleError, match=f"backwards, op 0 .* waits for op {other}"):
        simulate(schedule, _seconds, slowdown)
