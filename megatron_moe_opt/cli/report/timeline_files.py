"""How commands show timelines, predicted and measured: a table, a trace for Perfetto, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_moe_opt.cli.console import say_written, table_of
from megatron_moe_opt.output_file import Named, check_output_file, format_of
from megatron_moe_opt.schedules.picture import check_picture, write_picture
from megatron_moe_opt.schedules.schedule import Lane
from megatron_moe_opt.schedules.timeline import Timeline, overlap
from megatron_moe_opt.schedules.trace import write_trace

TRACE = ".json"


def check_timeline_files(option: str, files: Sequence[Path], others: Sequence[Named]) -> None:
    """Refuses, with ConfigurationError, files that cannot be written, or are among `others`, which are read, and
    pictures that cannot be drawn.
    """
    for file in files:
        check_output_file(option, file, others=others)
        if format_of(file) != TRACE:
            check_picture(file)


def write_timelines(timelines: Mapping[str, Timeline], files: Sequence[Path], console: Console) -> None:
    """Writes the files, and says so: a trace where the name ends in .json, else a picture."""
    for file in files:
        (write_trace if format_of(file) == TRACE else write_picture)(file, timelines)
        say_written(file, console)


def timelines_table(
    title: str, predicted: Mapping[str, Timeline] | None, measured: Mapping[str, Timeline] | None = None
) -> Table:
    """Returns one row a pass, and their sum: its time, how long each lane is busy in it, and how much of that overlaps.

    Args:
        predicted, measured: the passes by name. Where some were measured it is their lanes that are looked into.
    """
    shown = predicted if measured is None else measured
    lanes = [lane for lane in Lane if any(lane in timeline.schedule.lanes for timeline in shown.values())]
    times = ("predicted ms",) if measured is None else ("predicted ms", "measured ms", "error")
    headers = ("pass", *times, *(f"{lane.value} busy ms" for lane in lanes), "overlap")
    table = table_of(title, headers, caption="overlap: time hidden over time that could be hidden")
    for row, names in ({name: [name] for name in shown} | {"all": list(shown)}).items():
        timelines = [shown[name] for name in names]
        expected = predicted and sum(predicted[name].seconds for name in names)
        cells = ["-" if expected is None else f"{expected * 1e3:.4g}"]
        if measured is not None:
            took = sum(timeline.seconds for timeline in timelines)
            cells += [f"{took * 1e3:.4g}", "-" if expected is None else f"{expected / took - 1:+.1%}"]
        cells += [f"{sum(timeline.busy(lane) for timeline in timelines) * 1e3:.4g}" for lane in lanes]
        hidden = overlap(timelines)
        table.add_row(row, *cells, "-" if hidden is None else f"{hidden:.0%}")
    return table
