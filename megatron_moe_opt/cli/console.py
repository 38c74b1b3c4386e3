"""Where commands print. Text is printed as it is: names of files may look like Rich's markup."""

from __future__ import annotations

import sys

from rich.console import Console


def report_console(columns: int | None = None) -> Console:
    """Standard output.

    Args:
        columns: its width where no terminal has one of its own; None: what Rich takes it to have.
    """
    return Console(width=None if sys.stdout.isatty() else columns, markup=False)


def progress_console() -> Console:
    """Standard error, for what is to be seen while a command runs."""
    return Console(stderr=True, markup=False)
