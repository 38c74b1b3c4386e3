"""Prints the tables of a page of docs/papers: `python -m tools.papers monta` (parm, netmoe, mpmoe, hybridep)."""

from __future__ import annotations

import sys
from importlib import import_module

from tools.papers.published import table

PAPERS = ("monta", "parm", "netmoe", "mpmoe", "hybridep")


def lines(paper: str) -> list[str]:
    """Returns the lines of the numbers, of figures, then of what the model says at scale."""
    module = import_module(f"tools.papers.{paper}")
    return [*table(module.NUMBERS), "", *module.figures(), "", *module.scale()]


if __name__ == "__main__":
    for name in sys.argv[1:] or PAPERS:
        print(f"## {name}\n", *lines(name), sep="\n")
