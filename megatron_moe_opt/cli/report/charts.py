"""The charts of a report: drawn by matplotlib, returned as SVG that stands in the page.

matplotlib is imported when a chart is drawn. Every mark that is worth a closer look has a title, which browsers show
under the pointer.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from megatron_moe_opt.schedules.picture import draw_timeline
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.schedules.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, BASELINE, MARK = "#4aa0d8", "#a8adb3", "#d55e00"
# Close to Okabe and Ito's, which differ for all kinds of colour vision; four more for the rarer ops.
_COLOURS = (
    "#f0e442", OURS, "#e69f00", "#17a67d", "#cc79a7", BASELINE, "#56b4e9", "#e07a3f", "#a898ee", "#d8c49f", "#b98a66",
    "#b5cf6b",
)  # fmt: skip
_OP_COLOURS = {kind.value: _COLOURS[number % len(_COLOURS)] for number, kind in enumerate(Kind)}
_INCHES, _WIDE_INCHES = 6.4, 9.0
_TITLE = "title: "
_STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",  # text is text: small, and found by a search
    "text.parse_math": False,  # names may hold dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#d0d7de",
}


@dataclass(frozen=True)
class Bar:
    """One bar: a value, what it was drawn from, and one value to compare it with."""

    label: str
    value: float
    text: str
    """The text beside the bar."""
    samples: tuple[float, ...] = ()
    mark: float | None = None
    is_baseline: bool = False


def bars(name: str, title: str, data: Sequence[Bar], unit: str, value: str, mark: str | None = None) -> str:
    """Returns bars below each other with the span of their samples, each sample, and the mark.

    Args:
        name: of the chart, which no other chart of the page has.
        value, mark: what bars and marks stand for, in the legend.
    """
    with _drawn(name, title, 0.34 * len(data) + 0.9) as (svg, figure):
        axis = _axis(figure, unit, max(max(one.value, one.mark or 0.0, *one.samples) for one in data))
        for row, one in enumerate(data):
            (bar,) = axis.barh(row, one.value, color=BASELINE if one.is_baseline else OURS, height=0.62)
            bar.set_gid(f"{_TITLE}{one.label}: {one.text}")
            right = max(one.value, one.mark or 0.0, *one.samples)
            if one.samples:
                axis.plot([min(one.samples), max(one.samples)], [row, row], "|-", color="black", linewidth=1)
                axis.plot(one.samples, [row] * len(one.samples), "o", color="white", mec="black", mew=0.6, ms=3)
            if one.mark is not None:
                axis.plot([one.mark], [row], "D", color=MARK, mec="white", ms=6)
            axis.annotate(one.text, (right, row), (7, 0), textcoords="offset points", va="center")
        axis.set_yticks(range(len(data)), [one.label for one in data])
        axis.invert_yaxis()
        entries = {value: axis.barh([0], [0], color=OURS)}
        if any(one.is_baseline for one in data):
            entries["the baseline"] = axis.barh([0], [0], color=BASELINE)
        if any(one.samples for one in data):
            entries["a round"] = axis.plot([], [], "o-", color="black", mfc="white", ms=3)[0]
        if mark is not None:
            entries[mark] = axis.plot([], [], "D", color=MARK, mec="white", ms=6)[0]
        _legend(figure, entries)
    return svg()


def stacks(name: str, title: str, data: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Returns a bar for each label, with its parts one after another: label -> name of a part -> value."""
    parts = sorted({part for one in data.values() for part in one})
    free = [colour for colour in _COLOURS if colour not in {_OP_COLOURS.get(part) for part in parts}]
    colours = {part: _OP_COLOURS.get(part) or free.pop(0) for part in parts}
    with _drawn(name, title, 0.34 * len(data) + 0.9) as (svg, figure):
        axis, entries = _axis(figure, unit, max(sum(one.values()) for one in data.values())), {}
        for row, (label, one) in enumerate(data.items()):
            before = 0.0
            for part, value in one.items():
                entries[part] = axis.barh(row, value, left=before, color=colours[part], edgecolor="white", height=0.62)
                entries[part][0].set_gid(f"{_TITLE}{label}: {part}, {value:.2f} {unit}")
                before += value
            axis.annotate(f"{before:.2f} {unit}", (before, row), (5, 0), textcoords="offset points", va="center")
        axis.set_yticks(range(len(data)), list(data))
        axis.invert_yaxis()
        _legend(figure, entries)
    return svg()


def timeline(name: str, title: str, one: Timeline, longest: float) -> str:
    """Returns a row for each lane, on an axis of milliseconds up to `longest` seconds, by which charts compare."""
    with _drawn(name, title, 0.3 * len(one.schedule.lanes) + 1.1, _WIDE_INCHES) as (svg, figure):
        axis = figure.subplots()
        bars = draw_timeline(axis, one, longest * 1e3, lambda op: (_OP_COLOURS[op.kind.value], str(op.chunk)))
        for span, bar in zip(one.spans, bars, strict=True):
            size = f", {span.op.size} bytes" if span.op.size else ""
            bar.set_gid(f"{_TITLE}{span.op}: {span.start * 1e3:.3f} to {span.end * 1e3:.3f} ms{size}")
        axis.set_xlabel("ms")
        _legend(figure, {span.op.kind.value: bar for span, bar in zip(one.spans, bars, strict=True)})
    return svg()


def columns(name: str, title: str, values: Sequence[int], what: str) -> str:
    """Returns a column for each value, from the largest to the least, and their mean.

    Args:
        what: a value is of, such as `expert`; with its number it names the column.
    """
    order = sorted(range(len(values)), key=lambda index: -values[index])
    mean = sum(values) / len(values)
    with _drawn(name, title, 2.2, _INCHES / 1.6) as (svg, figure):
        axis = figure.subplots()
        for column, index in zip(
            axis.bar(range(len(order)), sorted(values, reverse=True), color=OURS), order, strict=True
        ):
            column.set_gid(f"{_TITLE}{what} {index}: {values[index]} rows")
        axis.axhline(mean, color="black", linestyle="--", linewidth=1)
        axis.annotate(f"mean {mean:.5g}", (1, mean), (0, 3), axis.get_yaxis_transform(), "offset points", ha="right")
        axis.set(xticks=[], xlabel=f"{what}s, the fullest first", ylabel="rows")
    return svg()


def _axis(figure: Figure, unit: str, largest: float) -> Axes:
    axis = figure.subplots()
    axis.grid(axis="x")
    axis.set_xlabel(unit)
    axis.set_xlim(0, 1.3 * largest or 1)  # with room for what is written beside the bars
    return axis


def _legend(figure: Figure, entries: Mapping[str, object]) -> None:
    figure.legend(entries.values(), entries.keys(), loc="outside lower left", ncols=3, frameon=False)


@contextmanager
def _drawn(name: str, title: str, height: float, width: float = _INCHES) -> Iterator[tuple[object, Figure]]:
    """Yields a figure to draw into, and what then returns it as SVG for a page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(_STYLE | {"svg.hashsalt": name}):  # salted: no two charts of a page have an id in common
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        drawn = io.StringIO()
        yield lambda: _inline(drawn.getvalue(), name, title), figure
        figure.savefig(drawn, format="svg", transparent=True)


def _inline(drawn: str, name: str, title: str) -> str:
    """Returns matplotlib's file as an element of a page: named, with titles in place of the ids of its groups."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    heading = f'role="img" aria-labelledby="{name}"'
    svg = svg.replace("<svg ", f"<svg {heading} ", 1).replace(">", f'><title id="{name}">{escape(title)}</title>', 1)
    return re.sub(
        r'<g id="([^"]*)"',
        lambda group: f"<g><title>{group[1].removeprefix(_TITLE)}</title" if group[1].startswith(_TITLE) else "<g",
        svg,
    )
