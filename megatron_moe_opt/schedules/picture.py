"""Timelines as a picture: one row a lane, one colour a chunk, the first timeline on top."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import format_of, written_whole
from megatron_moe_opt.schedules.schedule import Kind, Op
from megatron_moe_opt.schedules.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

_LABELS = {
    Kind.ALL_TO_ALL: "A2A",
    Kind.ALL_GATHER: "AG",
    Kind.REDUCE_SCATTER: "RS",
    Kind.SEND_RECEIVE: "P2P",
}
_FORMATS = (".png", ".svg", ".pdf")
# Parts of the axis. An op that is narrower has no room for its label, or for a white edge.
_NARROWEST_LABEL = 0.03
_NARROWEST_EDGE = 0.005
_NARROWEST_NAME = 0.3


def check_picture(path: str | Path) -> None:
    """Refuses, with ConfigurationError, a picture that `write_picture` could not write."""
    if format_of(path) not in _FORMATS:
        raise ConfigurationError(f"the picture {path} has no known format: end its name in {', '.join(_FORMATS)}")


def write_picture(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Draws timelines under their names, such as {"predicted": ..., "measured": ...}, on one axis of milliseconds.

    The file's format follows from its suffix (.png, .svg, .pdf).

    Raises:
        ConfigurationError: another suffix, there is nothing to draw, or the file cannot be
            written.
    """
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [max(1, len(timeline.schedule.lanes)) for timeline in timelines.values()]
    if not rows:
        raise ConfigurationError(f"there is no timeline to draw in {path}; give at least one")
    figure = Figure(figsize=(12, 0.9 * len(rows) + 0.45 * sum(rows)), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    longest = max(timeline.seconds for timeline in timelines.values()) * 1e3
    for axis, (name, timeline) in zip(axes, timelines.items(), strict=True):
        draw_timeline(axis, timeline, longest)
        title = f"{timeline.titled(name)}, {timeline.seconds * 1e3:.4g} ms"
        axis.set_title(title, loc="left", fontsize=10, pad=18 if timeline.parts else None)
    axes[-1].set_xlabel("ms")
    with written_whole(path) as partial:
        figure.savefig(partial, dpi=150)


def _by_chunk(op: Op) -> tuple[object, str]:
    """Returns an op's colour, its chunk's, and its label: `A2A 0` is the all-to-all of chunk 0."""
    from matplotlib import colormaps

    colours = colormaps["tab20"].colors
    return colours[op.chunk % len(colours)], f"{_LABELS.get(op.kind, op.kind.value)} {op.chunk}"


def draw_timeline(
    axis: Axes, timeline: Timeline, longest: float, look_of: Callable[[Op], tuple[object, str]] = _by_chunk
) -> list[Rectangle]:
    """Draws a row for each lane on an axis up to `longest` milliseconds; returns the bar of each of the spans.

    Args:
        look_of: an op's colour, and its label where there is room.
    """
    lanes = timeline.schedule.lanes
    bars: list[Rectangle] = []
    for span in timeline.spans:
        start, width = span.start * 1e3, (span.end - span.start) * 1e3
        row, op = lanes.index(span.op.lane), span.op
        colour, label = look_of(op)
        edge = "white" if width > _NARROWEST_EDGE * longest else colour
        bars += axis.barh(row, width, left=start, height=0.8, color=colour, edgecolor=edge)
        if width > _NARROWEST_LABEL * longest:
            axis.text(start + width / 2, row, label, ha="center", va="center", fontsize=8, clip_on=True)
    for part in timeline.parts:
        axis.axvline(part.end * 1e3, color="grey", linestyle=":", linewidth=1)
        middle = (part.start + part.end) / 2 * 1e3
        room = part.end - part.start > _NARROWEST_NAME * longest / 1e3
        name = part.name if room else part.name.partition(".")[0]  # its number
        axis.text(middle, -0.55, name, ha="center", va="bottom", fontsize=8, color="dimgrey")
    axis.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
    axis.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    axis.set_xlim(0, longest or 1)
    axis.spines[["top", "right"]].set_visible(False)
    return bars
