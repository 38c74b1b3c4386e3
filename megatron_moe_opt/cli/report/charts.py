"""Where the marks of a chart go: coordinates for the SVG of templates/charts.svg.j2. Plain arithmetic.

A drawing is WIDTH wide; 1 unit is a CSS pixel where the page has room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_moe_opt.schedules.picture import op_label
from megatron_moe_opt.schedules.schedule import Kind, Lane
from megatron_moe_opt.schedules.timeline import Timeline

WIDTH = 1000.0
TEXT = 7.3
"""Width of a character of the charts' 12 px text: of the wider ones among the fonts that browsers choose."""
TOP = 4.0
_AXIS = 22.0  # height of the axis' numbers
_LONGEST_GUTTER = 300.0
_BAR_STEP, _LANE_STEP = 30.0, 22.0
_PART_HEAD = 18.0
_NARROWEST = 0.8  # of an op that would be too narrow to be seen
_COLUMNS_WIDTH, _COLUMNS_HEIGHT = 480.0, 110.0
_COLUMNS_TOP = 18.0  # room for the mean's text

KINDS = {kind.value: number for number, kind in enumerate(Kind)}
"""Numbers of colour and pattern by an op's kind; a collective's name is one of them or gets a number of its own."""


@dataclass(frozen=True)
class Tick:
    """A number on an axis, and where it stands."""

    x: float
    text: str


@dataclass(frozen=True)
class Area:
    """The part of a drawing that has an axis under it."""

    left: float
    right: float
    end: float
    """The value on the right; 0 is on the left."""
    ticks: tuple[Tick, ...]

    def x(self, value: float) -> float:
        """Returns where a value stands on the axis."""
        return _round(self.left + value / self.end * (self.right - self.left))


@dataclass(frozen=True)
class BarData:
    """One bar: a value, what it was drawn from, and one value to compare it with."""

    label: str
    value: float
    text: str
    """What is written beside the bar."""
    samples: tuple[float, ...] = ()
    mark: float | None = None
    number: int = 1
    """The number of its colour."""


@dataclass(frozen=True)
class Bar:
    """A bar with its coordinates, as it is drawn."""

    label: str
    text: str
    middle: float
    x: float
    width: float
    low: float | None
    high: float | None
    samples: tuple[float, ...]
    mark: float | None
    text_x: float
    number: int


@dataclass(frozen=True)
class BarChart:
    """Bars below each other, on one axis."""

    area: Area
    bars: tuple[Bar, ...]
    height: float


@dataclass(frozen=True)
class Segment:
    """Part of a stacked bar, or an op of a timeline."""

    x: float
    width: float
    number: int
    """The number of its colour and pattern."""
    label: str
    """Empty where there is no room."""
    title: str


@dataclass(frozen=True)
class Row:
    """A stacked bar, or a lane, made of segments."""

    label: str
    top: float
    segments: tuple[Segment, ...]
    text: str = ""
    text_x: float = 0.0


@dataclass(frozen=True)
class RowChart:
    """Rows of segments; of a timeline, with its parts above them."""

    area: Area
    rows: tuple[Row, ...]
    height: float
    parts: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class Column:
    """One of the bars that stand side by side in a chart of columns."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class ColumnChart:
    """Columns, the tallest first, and where their mean is."""

    columns: tuple[Column, ...]
    mean_y: float
    bottom: float
    width: float
    height: float


def ticks(largest: float) -> tuple[float, ...]:
    """Returns 0, and two to five further multiples of 1, 2 or 5 times a power of ten, up to `largest`, which is above
    0.
    """
    magnitude = 10.0 ** math.floor(math.log10(largest))
    step = next(unit * magnitude for unit in (0.2, 0.5, 1.0, 2.0) if largest <= 5 * unit * magnitude * (1 + 1e-9))
    return tuple(float(f"{step * count:.12g}") for count in range(math.floor(largest / step * (1 + 1e-9)) + 1))


def bar_chart(data: Sequence[BarData]) -> BarChart:
    """Returns bars with the span of their samples, each sample, and the mark."""
    largest = max(max(one.value, one.mark or 0.0, *one.samples) for one in data)
    area = _area([one.label for one in data], largest, right=WIDTH - TEXT * max(len(one.text) for one in data) - 14)
    bars = []
    for index, one in enumerate(data):
        right = max(one.value, one.mark or 0.0, *one.samples)
        bars.append(
            Bar(
                one.label,
                one.text,
                TOP + (index + 0.5) * _BAR_STEP,
                area.left,
                _round(area.x(one.value) - area.left),
                area.x(min(one.samples)) if one.samples else None,
                area.x(max(one.samples)) if one.samples else None,
                tuple(area.x(sample) for sample in one.samples),
                None if one.mark is None else area.x(one.mark),
                area.x(right) + 12,
                one.number,
            )  # fmt: skip
        )
    return BarChart(area, tuple(bars), TOP + len(data) * _BAR_STEP + _AXIS)


def stack_chart(stacks: Mapping[str, Mapping[str, float]], numbers: Mapping[str, int], unit: str) -> RowChart:
    """Returns a bar for each stack, with its parts one after another.

    Args:
        stacks: label -> name of a part -> value.
        numbers: name of a part -> number of its colour and pattern.
    """
    sums = {label: sum(parts.values()) for label, parts in stacks.items()}
    texts = {label: f"{total:.2f} {unit}" for label, total in sums.items()}
    right = WIDTH - TEXT * max(map(len, texts.values())) - 14
    area = _area(list(stacks), max(sums.values()), right)
    rows = []
    for index, (label, parts) in enumerate(stacks.items()):
        segments, before = [], 0.0
        for name, value in parts.items():
            x, before = area.x(before), before + value
            title = f"{label}: {name}, {value:.2f} {unit}"
            segments.append(_segment(x, area.x(before) - x, numbers[name], (name,), title))
        rows.append(Row(label, TOP + index * _BAR_STEP + 5, tuple(segments), texts[label], area.x(sums[label]) + 8))
    return RowChart(area, tuple(rows), TOP + len(rows) * _BAR_STEP + _AXIS)


def timeline_chart(timeline: Timeline, longest: float) -> RowChart:
    """Returns a row for each lane, on an axis of milliseconds up to `longest` seconds, by which charts compare."""
    area = _area([lane.value for lane in Lane], longest * 1e3, right=WIDTH - 14)
    top = TOP + _PART_HEAD * bool(timeline.parts)
    rows = []
    for index, lane in enumerate(timeline.schedule.lanes):
        segments = []
        for span in timeline.lane(lane):
            x, end = area.x(span.start * 1e3), area.x(span.end * 1e3)
            title = f"{span.op}: {span.start * 1e3:.3f} to {span.end * 1e3:.3f} ms"
            title += f", {span.op.size} bytes" if span.op.size else ""
            labels = op_label(span.op), str(span.op.chunk)
            segments.append(_segment(x, max(end - x, _NARROWEST), KINDS[span.op.kind.value], labels, title))
        rows.append(Row(lane.value, top + index * _LANE_STEP, tuple(segments)))
    parts = []
    for part in timeline.parts:
        x = area.x(part.start * 1e3)
        labels = part.name, part.name.partition(".")[0]  # its number
        parts.append(_segment(x, area.x(part.end * 1e3) - x, 0, labels, part.name))
    return RowChart(area, tuple(rows), top + len(rows) * _LANE_STEP + _AXIS, tuple(parts))


def column_chart(values: Sequence[int], what: str) -> ColumnChart:
    """Returns a column for each value, from the largest to the least.

    Args:
        what: a value is of, such as `expert`; with its number it names the column.
    """
    order = sorted(range(len(values)), key=lambda index: -values[index])
    step, unit = _COLUMNS_WIDTH / len(values), _COLUMNS_HEIGHT / max(max(values), 1)
    gap = min(2.0, step / 5)
    bottom = _COLUMNS_TOP + _COLUMNS_HEIGHT
    columns = tuple(
        Column(
            _round(place * step),
            _round(bottom - values[index] * unit),
            _round(step - gap),
            _round(values[index] * unit),
            f"{what} {index}: {values[index]} rows",
        )
        for place, index in enumerate(order)
    )
    return ColumnChart(columns, _round(bottom - sum(values) / len(values) * unit), bottom, _COLUMNS_WIDTH, bottom + TOP)


def _segment(x: float, width: float, number: int, labels: Sequence[str], title: str) -> Segment:
    """Returns a segment with the first of its labels that there is room for."""
    label = next((one for one in labels if TEXT * len(one) <= width), "")
    return Segment(x, _round(width), number, label, title)


def _area(labels: Sequence[str], largest: float, right: float) -> Area:
    left = min(TEXT * max(map(len, labels)) + 14, _LONGEST_GUTTER)
    end = largest or 1.0
    marks = tuple(Tick(_round(left + number / end * (right - left)), f"{number:g}") for number in ticks(end))
    return Area(left, right, end, marks)


def _round(place: float) -> float:
    return round(place, 2)
