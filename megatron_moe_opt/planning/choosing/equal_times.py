"""Choosing by predicted times, of which some are too close to be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

TIE = 1 + 1e-9  # times this close are equal but for rounding
EQUAL_WITHIN = 0.03
"""The part of the least time within which predictions cannot be told from it: no cuts for a gain that may be none."""

C = TypeVar("C")


def fewest_of_equal(candidates: Sequence[tuple[float, int, C]]) -> C:
    """Returns what to take of candidates (seconds, parts, what): the same on every rank that has the same candidates.

    Among those that exceed the least time by up to EQUAL_WITHIN of it, it is the one in fewest parts; of several such
    the fastest, and of equally fast ones the first.
    """
    least = min(seconds for seconds, _, _ in candidates) * (1 + EQUAL_WITHIN)
    fewest = min(parts for seconds, parts, _ in candidates if seconds <= least)
    of_fewest = [(seconds, what) for seconds, parts, what in candidates if parts == fewest]
    fastest = min(seconds for seconds, _ in of_fewest) * TIE
    return next(what for seconds, what in of_fewest if seconds <= fastest)
