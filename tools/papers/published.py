"""A number that a paper prints, and ours for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tools.markdown_rows import row

EXACT, ARITHMETIC, PREDICTED, FITTED = "exact", "their arithmetic", "predicted", "fitted"
PREDICTED_WITHIN = 0.25
"""The part of the published number within which this project asks its own predictions to be of
measurements (docs/papers).
"""


@dataclass(frozen=True)
class Published:
    """One assertion."""

    what: str
    theirs: float | str
    source: str
    """The table, figure, equation or section; the page where the text at hand has pages."""
    ours: Callable[[], float | str]
    kind: str
    """How ours comes about. EXACT: counted by the code that runs, or by the closed forms of its model. ARITHMETIC:
    other numbers that the paper prints, put into its own formulas. PREDICTED: by the simulator, for the paper's cluster
    as it is described. FITTED: of routing that was made to have it.
    """
    within: float = 0.0
    """How far ours may be, in the number's own unit."""
    unmet: str = ""
    """Why ours is further off, and what would change that; empty: it is not."""

    @property
    def met(self) -> bool:
        """Whether ours is as near as `within` says."""
        ours = self.ours()
        if isinstance(self.theirs, str) or isinstance(ours, str):
            return ours == self.theirs
        return abs(ours - self.theirs) <= self.within * (1 + 1e-9)


def counted(
    what: str, theirs: float, source: str, ours: Callable[[], float], digit: float = 0.0, **more: str
) -> Published:
    """Returns an exact count. `digit`: a unit of the last printed digit: papers round some
    numbers and cut off others.
    """
    return Published(what, theirs, source, ours, EXACT, digit, **more)


def follows(what: str, theirs: float, source: str, ours: Callable[[], float], digit: float, **more: str) -> Published:
    """Returns a number that follows from theirs by their own formula, up to one unit of the last printed digit."""
    return Published(what, theirs, source, ours, ARITHMETIC, digit, **more)


def predicted(
    what: str, theirs: float, source: str, ours: Callable[[], float], part: float = PREDICTED_WITHIN, **more: str
) -> Published:
    """Returns a number that is predicted within a part of the published one."""
    return Published(what, theirs, source, ours, PREDICTED, part * abs(theirs), **more)


def fitted(what: str, theirs: float, source: str, ours: Callable[[], float], within: float) -> Published:
    """Returns a number found again in routing of which two constants a row were fitted to the published numbers."""
    return Published(what, theirs, source, ours, FITTED, within)


def chosen(what: str, theirs: str, source: str, ours: Callable[[], str], **more: str) -> Published:
    """Returns a choice that is the same, or not."""
    return Published(what, theirs, source, ours, PREDICTED, **more)


def shown(number: float | str) -> str:
    """Returns a number as tables have it: four digits."""
    return number if isinstance(number, str) else f"{number:.4g}"


def table(numbers: Iterable[Published]) -> Iterator[str]:
    """Yields the rows of a page of docs/papers."""
    yield "| published | source | theirs | ours | kind | asserted within | |"
    yield "|---|---|---:|---:|---|---:|---|"
    for one in numbers:
        within = shown(one.within) if one.within else "equal"
        state = "" if not one.unmet else f"**not met**: {one.unmet}"
        yield row(one.what, one.source, shown(one.theirs), shown(one.ours()), one.kind, within, state)
