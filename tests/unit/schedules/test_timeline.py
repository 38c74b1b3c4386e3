"""Timelines one after another, and what they hide."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt.cli.bench.recorded_step import RecordedStep
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.expert_migration import gathered
from megatron_moe_opt.schedules.monta import outline
from megatron_moe_opt.schedules.picture import write_picture
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from megatron_moe_opt.schedules.timeline import Part, Span, Timeline, as_they_ran, one_after_another
from megatron_moe_opt.schedules.trace import write_trace
from tests.schedule_checks import validate
from tests.unit.schedule_cases import timeline_of

SECONDS = {Kind.ALL_TO_ALL: 4e-3, Kind.ALL_GATHER: 2e-3, Kind.REDUCE_SCATTER: 3e-3, Kind.SUM: 1e-3, Kind.COPY: 1e-3}
SLOWDOWN = {(Lane.INTER, Lane.INTRA): 0.5, (Lane.COPY, Lane.INTRA): 0.8}


def _seconds(op: Op) -> float:
    return SECONDS[op.kind] * (1 + op.chunk)


sizes = st.tuples(st.sampled_from(["dispatch", "combine"]), st.integers(1, 4), st.integers(1, 2), st.integers(1, 2))


@settings(max_examples=100)
@given(st.lists(sizes, max_size=4), st.sampled_from(["O1", "O2", "O3"]), st.sampled_from([{}, SLOWDOWN]))
def test_the_schedule_of_the_parts_takes_their_times(parts, level, slowdown):
    """Played as one schedule, every op starts and ends where the parts, one after another, put it."""
    schedules = [outline(way, level, chunks, ep, etp).schedule for way, chunks, ep, etp in parts]
    timelines = {str(index): simulate(schedule, _seconds, slowdown) for index, schedule in enumerate(schedules)}
    joined = one_after_another("all", timelines)
    validate(joined.schedule)
    assert joined.schedule.name == "all"
    assert tuple(span.op for span in joined.spans) == joined.schedule.ops
    played = simulate(joined.schedule, _seconds, slowdown)
    for span, expected in zip(joined.spans, played.spans, strict=True):
        assert (span.start, span.end) == pytest.approx((expected.start, expected.end))
    assert joined.seconds == pytest.approx(sum(timeline.seconds for timeline in timelines.values()))
    assert [part.name for part in joined.parts] == list(timelines)
    for part, timeline in zip(joined.parts, timelines.values(), strict=True):
        assert part.end - part.start == pytest.approx(timeline.seconds)
    for one, other in zip(joined.parts, joined.parts[1:], strict=False):
        assert one.end == other.start


def test_a_part_without_ops_takes_no_time():
    nothing = Timeline(Schedule("nothing", ()), ())
    one = simulate(outline("dispatch", "O1", 1, 2, 1).schedule, _seconds)
    joined = one_after_another("all", {"first": one, "nothing": nothing, "last": one})
    assert joined.parts == (Part("first", 0.0, 5e-3), Part("nothing", 5e-3, 5e-3), Part("last", 5e-3, 10e-3))
    assert joined.schedule.ops[2].waits_for == (0, 1)  # the last op of each lane of the first part


def test_what_ran_beside_the_schedules_is_shown_where_it_ran():
    """Two schedules with a gap between them; a gather beside both, of two levels; a schedule that is shown first began
    first, whatever the order.
    """
    first = replace(simulate(outline("dispatch", "O1", 1, 2, 1).schedule, _seconds), began=7.0)
    second = replace(first, began=7.1)
    travel = gathered({0: 200, 1: 800})
    assert [(op.kind, op.size, op.waits_for) for op in travel.ops] == [
        (Kind.ALL_GATHER, 200, ()),
        (Kind.ALL_GATHER, 800, (0,)),
    ]
    beside = Timeline(travel, (Span(travel.ops[0], 0.0, 0.05), Span(travel.ops[1], 0.05, 0.2)), began=7.001)
    joined = as_they_ran("all", {"2": second, "1": first, "gather": beside})
    validate(joined.schedule)
    assert [part.name for part in joined.parts] == ["1", "2"]
    assert [(part.start, part.end) for part in joined.parts] == [
        pytest.approx((0, 5e-3)),
        pytest.approx((0.1, 0.105)),
    ]
    spans = joined.lane(Lane.EXPERTS)
    assert [(span.start, span.end) for span in spans] == [pytest.approx((1e-3, 0.051)), pytest.approx((0.051, 0.201))]
    assert joined.schedule.ops.index(spans[0].op) in spans[1].op.waits_for
    assert joined.seconds == pytest.approx(0.201)

    step = RecordedStep(0, (first, second, beside))
    assert step.schedules == (first, second)
    assert step.joined("s").seconds == pytest.approx(0.201)
    assert RecordedStep(0, (first, second)).joined("s").seconds == pytest.approx(0.01)  # without the gap


@pytest.mark.parametrize(
    ("spans", "hidden", "hideable"),
    [
        ([], 0, 0),
        ([(Lane.INTER, 0, 4)], 0, 0),
        ([(Lane.INTER, 0, 4), (Lane.INTRA, 4, 7)], 0, 3),  # one after another
        ([(Lane.INTER, 0, 4), (Lane.INTRA, 1, 4)], 3, 3),  # all of it
        ([(Lane.INTER, 0, 4), (Lane.INTRA, 3, 6), (Lane.COPY, 5, 7)], 2, 5),
        ([(Lane.INTER, 0, 4), (Lane.INTRA, 6, 7)], -2, 1),  # nobody is busy from 4 to 6
    ],
)
def test_hidden_time(spans, hidden, hideable):
    timeline = timeline_of(*spans)
    assert (timeline.hidden, timeline.hideable) == (hidden, hideable)
    assert timeline.busy(Lane.INTER) == (4 if spans else 0)


@pytest.fixture
def joined():
    first = simulate(outline("dispatch", "O3", 2, 2, 2).schedule, _seconds)
    return one_after_another("step", {"there": first, "back again": first})


def test_trace_has_a_thread_for_the_parts(joined, tmp_path):
    write_trace(tmp_path / "trace.json", {"measured": joined})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {1: "part", 2: "inter", 3: "intra", 4: "copy"}
    parts = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    half = joined.seconds / 2 * 1e6
    assert [(event["name"], event["ts"], event["dur"]) for event in parts] == [
        ("there", 0, pytest.approx(half)),
        ("back again", pytest.approx(half), pytest.approx(half)),
    ]
    ops = [event for event in events if event["ph"] == "X" and event["tid"] > 1]
    for event, span in zip(ops, joined.spans, strict=True):
        assert threads[event["tid"]] == span.op.lane.value
        assert (event["ts"], event["dur"]) == pytest.approx((span.start * 1e6, (span.end - span.start) * 1e6))


def test_picture_marks_the_parts(joined, tmp_path):
    """There is more grey with parts (their names and borders) than without."""
    from matplotlib.image import imread

    grey = []
    for timeline in (joined, Timeline(joined.schedule, joined.spans)):
        write_picture(tmp_path / "picture.png", {"measured": timeline})
        pixels = imread(tmp_path / "picture.png")[:, :, :3]
        grey.append(((pixels.max(axis=2) - pixels.min(axis=2) < 0.02) & (abs(pixels[:, :, 0] - 0.45) < 0.1)).sum())
    assert grey[0] > grey[1] + 200


def test_ops_too_short_for_an_edge_can_be_seen(tmp_path):
    from matplotlib.image import imread

    write_picture(tmp_path / "picture.png", {"measured": timeline_of((Lane.INTER, 0.0, 1.0), (Lane.COPY, 0.5, 0.5001))})
    pixels = imread(tmp_path / "picture.png")[:, :, :3]
    blue = pixels[:, :, 2] - pixels[:, :, 0] > 0.2
    rows = blue.any(axis=1).nonzero()[0]
    assert (rows[1:] - rows[:-1] > 5).sum() == 1  # two lanes with colour, and a gap between them
