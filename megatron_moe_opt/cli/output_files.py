"""The files that commands write: refused before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

from rich.console import Console

from megatron_moe_opt.errors import ConfigurationError, printable
from megatron_moe_opt.schedules.picture import check_picture, write_picture
from megatron_moe_opt.schedules.timeline import Timeline
from megatron_moe_opt.schedules.trace import write_trace


def check_output(flag: str, file: Path | None) -> None:
    """Refuses, with ConfigurationError, a file that has no place to be written to."""
    if file is None:
        return
    if file.is_dir():
        raise ConfigurationError(f"{flag} {file} is a folder: name a file in it")
    if not file.absolute().parent.is_dir():
        raise ConfigurationError(f"{flag} {file}: its folder does not exist; create it or choose another")
    try:
        # Trying is the only test that knows read-only file systems too. All ranks try, so none makes the file itself.
        with file.open("ab") if file.exists() else TemporaryFile(dir=file.absolute().parent):
            pass
    except OSError as error:
        raise ConfigurationError(f"{flag} {file} cannot be written ({error.strerror}): choose another file") from error


def check_timeline_files(trace: Path | None, png: Path | None) -> None:
    """`check_output` of --trace and --png; refuses, with ConfigurationError, a picture that cannot be drawn too."""
    check_output("--trace", trace)
    check_output("--png", png)
    if png is not None:
        check_picture(png)


def write_timelines(timelines: Mapping[str, Timeline], trace: Path | None, png: Path | None, console: Console) -> None:
    """Writes those of the two files that were asked for, and says so."""
    for file, write in ((trace, write_trace), (png, write_picture)):
        if file is not None:
            write(file, timelines)
            say_written(file, console)


def say_written(file: Path, console: Console) -> None:
    """A line that is not wrapped, so that it can be copied."""
    console.print(f"written to {printable(str(file))}", highlight=False, soft_wrap=True)
