"""Where commands print, and their tables. Text is printed as it is: names of files may look like Rich's markup."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_moe_opt.errors import printable


def report_console(columns: int | None = None) -> Console:
    """Returns standard output, for what a command has found out.

    Args:
        columns: its width where no terminal has one of its own; None: what Rich takes it to have.
    """
    return Console(width=None if sys.stdout.isatty() else columns, markup=False)


def progress_console() -> Console:
    """Returns standard error, for what is to be seen while a command runs."""
    return Console(stderr=True, markup=False)


LINE_SECONDS = 30.0
"""The seconds between two lines of progress where there is no terminal."""


@contextmanager
def progress(what: str, is_shown: bool = True) -> Iterator[Callable[[int, int, str], None]]:
    """Yields what is to be told how many parts are done, of how many, and what comes next.

    A terminal shows a bar; elsewhere, such as in the log of a job, a line every LINE_SECONDS says how far it is.
    """
    console = progress_console()
    if not is_shown:
        yield lambda done, of, part: None
    elif console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, of, part: bar.update(task, total=of, completed=done, description=f"{what} {part}")
    else:
        with _lines(console, what) as tell:
            yield tell


@contextmanager
def _lines(console: Console, what: str) -> Iterator[Callable[[int, int, str], None]]:
    reached, start, ended = what, time.perf_counter(), threading.Event()

    def tell(done: int, of: int, part: str) -> None:
        nonlocal reached
        reached = f"{what} {part}".rstrip() + f", {done} of {of} done"

    def repeat() -> None:
        while not ended.wait(LINE_SECONDS):
            say(console, f"moe-opt: {reached}, after {time.perf_counter() - start:.0f} s")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()


def say(console: Console, text: str) -> None:
    """Prints a line that is neither wrapped nor coloured, so that it can be copied."""
    console.print(text, highlight=False, soft_wrap=True)


def say_written(file: Path, console: Console) -> None:
    """Says, in a line that can be copied, which file was written."""
    say(console, f"written to {printable(str(file))}")


def table_of(
    title: str,
    headers: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    names: int = 1,
    caption: str | None = None,
) -> Table:
    """Returns a table with these columns and rows; further rows can be added to it.

    Args:
        names: columns on the left that name a row. The others hold numbers, which stand on the right.
    """
    table = Table(title=title, caption=caption)
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index < names else "right", no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
