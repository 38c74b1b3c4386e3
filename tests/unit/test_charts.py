"""Coordinates of charts: nothing lies outside, lengths are in proportion."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt.cli.report.charts import (
    KINDS,
    WIDTH,
    BarData,
    bar_chart,
    column_chart,
    stack_chart,
    ticks,
    timeline_chart,
)
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.timeline import one_after_another
from tests.unit.schedule_cases import schedules

POSITIVE = st.floats(1e-6, 1e9)
OFF = 0.02  # coordinates are rounded


@given(POSITIVE)
def test_ticks(largest):
    numbers = ticks(largest)
    steps = [b - a for a, b in zip(numbers, numbers[1:], strict=False)]
    assert numbers[0] == 0 and 3 <= len(numbers) <= 6
    assert numbers[-1] <= largest * (1 + 1e-9) and largest - numbers[-1] <= steps[0] * (1 + 1e-9)
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert f"{steps[0]:.6e}"[:8] in ("1.000000", "2.000000", "5.000000")


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(1, (0, 0.2, 0.4, 0.6, 0.8, 1)), (1500, (0, 500, 1000, 1500)), (0.034, (0, 0.01, 0.02, 0.03))],
)
def test_ticks_of_some_axes(largest, expected):
    assert ticks(largest) == expected


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.text(max_size=60), st.lists(POSITIVE, min_size=1, max_size=5), st.none() | POSITIVE),
        min_size=1,
        max_size=8,
    )
)
def test_bars_stay_inside_and_compare(rows):
    data = [BarData(label, max(samples), "12.3 ms", tuple(samples), mark) for label, samples, mark in rows]
    chart = bar_chart(data)
    largest = max(max(one.value, one.mark or 0) for one in data)
    length = chart.area.right - chart.area.left
    assert 0 < chart.area.left < chart.area.right < WIDTH
    for bar, one in zip(chart.bars, data, strict=True):
        assert bar.width == pytest.approx(one.value / largest * length, abs=OFF)
        assert bar.low == pytest.approx(chart.area.x(min(one.samples))) and bar.high == chart.area.x(max(one.samples))
        assert len(bar.samples) == len(one.samples)
        assert (bar.mark is None) == (one.mark is None)
        assert max(bar.high, bar.mark or 0) < bar.text_x < WIDTH
        assert 0 < bar.middle < chart.height
    assert len({bar.middle for bar in chart.bars}) == len(data)


def test_bars_of_nothing():
    """A step may take no memory at all."""
    assert [bar.width for bar in bar_chart([BarData("a", 0.0, "0 MB"), BarData("b", 0.0, "0 MB")]).bars] == [0, 0]


MEASURED = st.just(0.0) | st.floats(1e-12, 1e6)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), MEASURED, min_size=1), min_size=1, max_size=5))
def test_parts_of_a_stack_follow_each_other(stacks):
    chart = stack_chart({str(index): parts for index, parts in enumerate(stacks)}, {"a": 0, "b": 1, "c": 9}, "MB")
    for row, parts in zip(chart.rows, stacks, strict=True):
        assert [segment.number for segment in row.segments] == [{"a": 0, "b": 1, "c": 9}[name] for name in parts]
        place = chart.area.left
        for segment in row.segments:
            assert segment.x == pytest.approx(place, abs=OFF)
            place = segment.x + segment.width
        assert place == pytest.approx(chart.area.x(sum(parts.values())), abs=OFF)
        assert place <= row.text_x < WIDTH


@settings(max_examples=40)
@given(st.lists(schedules(), min_size=1, max_size=3), st.floats(1, 3))
def test_a_timeline_has_every_op_in_its_lane(made, room):
    parts = {str(number): simulate(schedule, lambda op: op.size / 1e3) for number, schedule in enumerate(made)}
    timeline = one_after_another("all", parts)
    chart = timeline_chart(timeline, timeline.seconds * room)
    assert [row.label for row in chart.rows] == [lane.value for lane in timeline.schedule.lanes]
    assert [part.title for part in chart.parts] == list(parts)
    for row, lane in zip(chart.rows, timeline.schedule.lanes, strict=True):
        spans = timeline.lane(lane)
        assert len(row.segments) == len(spans)
        for segment, span in zip(row.segments, spans, strict=True):
            assert segment.x == chart.area.x(span.start * 1e3)
            assert segment.width >= 0.8 and segment.x + segment.width <= WIDTH
            assert segment.number == KINDS[span.op.kind.value]
            assert str(span.op) in segment.title


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=300))
def test_columns_stand_side_by_side_the_tallest_first(values):
    chart = column_chart(values, "expert")
    heights = [column.height for column in chart.columns]
    assert heights == sorted(heights, reverse=True)
    assert all(column.y + column.height == pytest.approx(chart.bottom, abs=OFF) for column in chart.columns)
    assert all(0 <= column.x <= chart.width and column.y >= 0 and column.width > 0 for column in chart.columns)
    assert all(a.x + a.width <= b.x + OFF for a, b in zip(chart.columns, chart.columns[1:], strict=False))
    mean = (chart.bottom - chart.mean_y) / max(heights[0], 1) * max(*values, 1)
    assert mean == pytest.approx(sum(values) / len(values), rel=0.01, abs=max(values) / 1000)
    titles = {column.title for column in chart.columns}
    assert titles == {f"expert {index}: {value} rows" for index, value in enumerate(values)}
