"""Timelines as a picture: one row a lane, one colour a chunk, the first timeline on top."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import written_whole
from megatron_moe_opt.schedules.schedule import Kind, Op
from megatron_moe_opt.schedules.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def op_label(op: Op) -> str:
    """Short enough for a bar: `A2A 0` is the all-to-all of chunk 0."""
    return f"{_LABELS.get(op.kind, op.kind.value)} {op.chunk}"


def check_picture(path: str | Path) -> None:
    """Refuses, with ConfigurationError, a picture that `write_picture` could not write."""
    if Path(path).suffix not in _FORMATS:
        raise ConfigurationError(f"the picture {path} has no known format: end its name in {', '.join(_FORMATS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"the picture {path} needs matplotlib ({error}); install it with pip install matplotlib, or write a trace"
        ) from error


def write_picture(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Draws timelines under their names, such as {"predicted": ..., "measured": ...}, on one axis of milliseconds.

    The file's format follows from its suffix (.png, .svg, .pdf).

    Raises:
        ConfigurationError: another suffix, matplotlib is not installed, there is nothing to draw, or the file cannot be
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
        _draw(axis, timeline, longest)
        title = f"{name}: {timeline.schedule.name}, {timeline.seconds * 1e3:.4g} ms"
        axis.set_title(title, loc="left", fontsize=10, pad=18 if timeline.parts else None)
    axes[-1].set_xlabel("ms")
    with written_whole(path) as partial:
        figure.savefig(partial, dpi=150)


def _draw(axis: Axes, timeline: Timeline, longest: float) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab20"].colors
    lanes = timeline.schedule.lanes
    for span in timeline.spans:
        start, width = span.start * 1e3, (span.end - span.start) * 1e3
        row, op = lanes.index(span.op.lane), span.op
        colour = colours[op.chunk % len(colours)]
        edge = "white" if width > _NARROWEST_EDGE * longest else colour
        axis.barh(row, width, left=start, height=0.8, color=colour, edgecolor=edge)
        if width > _NARROWEST_LABEL * longest:
            axis.text(start + width / 2, row, op_label(op), ha="center", va="center", fontsize=8, clip_on=True)
    for part in timeline.parts:
        axis.axvline(part.end * 1e3, color="grey", linestyle=":", linewidth=1)
        middle = (part.start + part.end) / 2 * 1e3
        axis.text(middle, -0.55, part.name, ha="center", va="bottom", fontsize=8, color="dimgrey")
    axis.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
    axis.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    axis.set_xlim(0, longest or 1)
    axis.spines[["top", "right"]].set_visible(False)
