"""The papers' numbers against ours: within the tolerance of each, or strictly not, for the reason that it states."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tools.papers.__main__ import PAPERS
from tools.papers.published import ARITHMETIC, EXACT, PREDICTED, table

PAGES = Path(__file__).parents[2] / "docs" / "papers"

NUMBERS_OF = {paper: import_module(f"tools.papers.{paper}").NUMBERS for paper in PAPERS}
NUMBERS = [
    pytest.param(
        one,
        id=f"{paper}-{one.source}-{one.what}",
        marks=[pytest.mark.xfail(reason=one.unmet, strict=True)] if one.unmet else [],
    )
    for paper in PAPERS
    for one in NUMBERS_OF[paper]
]


@pytest.mark.parametrize("number", NUMBERS)
def test_number(number):
    assert number.met, f"published {number.theirs}, ours {number.ours()}, asserted within {number.within}"


def test_eighty_of_our_own_and_more():
    asserted = [param.values[0] for param in NUMBERS if not param.marks]
    assert len([one for one in asserted if one.kind != ARITHMETIC]) >= 80
    assert len({param.id for param in NUMBERS}) == len(NUMBERS)


def _ours(rows):
    """By what is published and where, what a table has in the column of ours."""
    cells = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("| "))
    numbers = (row for row in cells if len(row) == 7 and row[4] in (EXACT, ARITHMETIC, PREDICTED))
    return {(what, source): ours for what, source, _, ours, *_ in numbers}


@pytest.mark.parametrize("paper", PAPERS)
def test_pages_show_what_is_asserted(paper):
    """As `python -m tools.papers` prints it, but for what less than 2 % of a prediction changes."""
    page, printed = _ours((PAGES / f"{paper}.md").read_text().splitlines()), _ours(table(NUMBERS_OF[paper]))
    assert page.keys() == printed.keys()
    for key, ours in printed.items():
        try:
            assert float(page[key]) == pytest.approx(float(ours), rel=0.02), key
        except ValueError:
            assert page[key] == ours, key


def test_the_index_counts_them():
    asserted, unmet = ([param for param in NUMBERS if bool(param.marks) is not_met] for not_met in (False, True))
    index = (PAGES / "README.md").read_text()
    assert f"{len(asserted)} published numbers are assertions" in index and f"{len(unmet)} others" in index
