"""The files of timelines that commands write: a trace for Perfetto, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from megatron_moe_opt.cli.console import say_written
from megatron_moe_opt.output_file import check_output_file
from megatron_moe_opt.schedules.picture import check_picture, write_picture
from megatron_moe_opt.schedules.timeline import Timeline
from megatron_moe_opt.schedules.trace import write_trace


def check_timeline_files(trace: Path | None, png: Path | None) -> None:
    """`check_output_file` of --trace and --png; a picture that cannot be drawn is refused too."""
    check_output_file("--trace", trace)
    check_output_file("--png", png)
    if png is not None:
        check_picture(png)


def write_timelines(timelines: Mapping[str, Timeline], trace: Path | None, png: Path | None, console: Console) -> None:
    """Writes those of the two files that were asked for, and says so."""
    for file, write in ((trace, write_trace), (png, write_picture)):
        if file is not None:
            write(file, timelines)
            say_written(file, console)
