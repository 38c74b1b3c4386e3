"""Rows of the tables that tools print in Markdown."""

from __future__ import annotations

from collections.abc import Iterator


def row(*cells: object) -> str:
    """Returns a row with these cells."""
    return "| " + " | ".join(map(str, cells)) + " |"


def head(*names: str, texts: int = 1) -> Iterator[str]:
    """Yields the head of a table whose first `texts` columns are text, and whose others are numbers."""
    yield row(*names)
    yield row(*["---"] * texts, *["---:"] * (len(names) - texts)).replace(" ", "")
