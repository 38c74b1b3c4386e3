"""Where commands print, and their tables. Text is printed as it is: names of files may look like Rich's markup."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
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
        table.add_column(header, justify="left" if index < names else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    return table
