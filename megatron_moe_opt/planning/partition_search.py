"""How many partitions, found by trying few of them (MPMoE, Algorithm 1).

Two things are taken to hold: over n, a layer's time falls and then rises; and the best n never falls as the tokens B
grow. So what is known is a list of ranges of B, one for each n that was ever best, ascending in both:

    G = {1: (0, 1), 8: (inf, inf)}          before anything was measured
    G = {1: (0, 1), 3: (900, 1200), 8: (inf, inf)}

A B inside a range takes that range's n. Any other B lies between two ranges: only the n from one's to the other's are
tried, up to the turning point, and the range of the n that was best is widened to B, or made. (Line 22 of the printed
algorithm names B_lower and B_upper, which are nowhere defined; meant are B_floor and B_ceil of that n.)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

PARTITIONS = (1, 2, 3, 4, 5, 6, 7, 8)
"""To choose from: the paper's 2 to 8, and not to cut at all."""
TOLERANCE = 0.03
"""Times this close count as equal: measurements are no better, and a search must not end at a bump. Of equal ones the
fewest partitions are best: what a layer does around its pipeline grows with them, and an n that is too large by chance
would rule smaller ones out for all larger B."""


@dataclass
class PartitionSearch:
    """The best number of partitions for any number of tokens, for one way of keeping memory.

    Ask `trial` what to measure, tell `measured` how long it took, until there is nothing to measure; `best` is known
    then. Where a search would turn it measures a second time, and the least counts: a disturbed measurement can only be
    too long. Everything follows from what is told, so that ranks that are told alike choose alike.

    Raises:
        ValueError: counts that are not ascending, or none.
    """

    counts: Sequence[int] = PARTITIONS
    """Numbers of partitions to choose from, ascending."""
    tolerance: float = TOLERANCE
    ranges: dict[int, tuple[float, float]] = field(init=False)
    """G: (least, greatest) number of tokens that n is known to be best for, by n; ascending in both."""
    chosen: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    """C: n by tokens and the least n that was allowed."""
    _times: dict[tuple[int, int], float] = field(default_factory=dict, init=False)
    """Seconds by tokens and n."""
    _repeated: set[tuple[int, int]] = field(default_factory=set, init=False)
    """What was measured again."""

    def __post_init__(self) -> None:
        if not self.counts or any(one >= other for one, other in pairwise(self.counts)):
            raise ValueError(f"numbers of partitions {tuple(self.counts)} do not ascend")
        fewest, most = self.counts[0], self.counts[-1]
        self.ranges = {fewest: (0, 1), most: (math.inf, math.inf)} if fewest < most else {most: (0, math.inf)}

    def trial(self, tokens: int, least: int = 1, start: int | None = None) -> int | None:
        """The number of partitions to measure next; None: `best` is known.

        Args:
            least: fewer partitions are not allowed, say for the memory that they take.
            start: where to begin, such as at the best n of a similar search; None: at the fewest.

        Raises:
            ValueError: no number of partitions is as large as `least`.
        """
        least = self.counts[self._index(least)]
        if (tokens, least) in self.chosen:
            return None
        low, high = self._bounds(tokens)
        if high <= least:  # past the best one, time only rises
            self.chosen[tokens, least] = least
            return None
        if low == high:
            self._choose(tokens, least, low)
            return None
        untried = self._next(tokens, max(low, least), high, start)
        if untried is None:
            tried = {
                n: self._times[tokens, n]
                for n in self.counts
                if max(low, least) <= n <= high and (tokens, n) in self._times
            }
            equal = min(tried.values()) * (1 + self.tolerance)
            self._choose(tokens, least, min(n for n, seconds in tried.items() if seconds <= equal))
        return untried

    def measured(self, tokens: int, partitions: int, seconds: float) -> None:
        """What a trial took."""
        before = self._times.get((tokens, partitions))
        if before is not None:
            self._repeated.add((tokens, partitions))
            seconds = min(before, seconds)
        self._times[tokens, partitions] = seconds

    def best(self, tokens: int, least: int = 1) -> int:
        """The choice. Raises KeyError before `trial` has said that there is one."""
        return self.chosen[tokens, self.counts[self._index(least)]]

    def seconds(self, tokens: int) -> dict[int, float]:
        """What was measured for so many tokens, by number of partitions."""
        return {n: seconds for (of, n), seconds in self._times.items() if of == tokens}

    def _bounds(self, tokens: int) -> tuple[int, int]:
        """The n whose ranges lie around so many tokens; the same one twice where a range holds them (line 6)."""
        low = self.counts[0]
        for n, (floor, ceil) in self.ranges.items():
            if floor <= tokens <= ceil:
                return n, n
            if tokens < floor:
                return low, n
            low = n
        raise AssertionError("the last range ends at infinity")

    def _next(self, tokens: int, low: int, high: int, start: int | None) -> int | None:
        """searchBestGran: upwards from `start` to the turning point; downwards too, unless it has only fallen."""
        counts = [n for n in self.counts if low <= n <= high]
        first = min(bisect_left(counts, start), len(counts) - 1) if start is not None else 0
        best = math.inf
        for direction in (counts[first:], counts[first::-1]):
            for n in direction:
                seconds = self._times.get((tokens, n))
                if seconds is None:
                    return n
                if seconds > best * (1 + self.tolerance):
                    if (tokens, n) not in self._repeated:
                        return n
                    break
                best = min(best, seconds)
            if self._times[tokens, counts[first]] > best * (1 + self.tolerance):
                break  # it has fallen on this side, so it rises on the other
        return None

    def _choose(self, tokens: int, least: int, n: int) -> None:
        """Lines 19 to 24. Where a smaller n was not allowed, the best of the others says nothing about other tokens."""
        self.chosen[tokens, least] = n
        low, _ = self._bounds(tokens)
        if least <= low or n > least:
            floor, ceil = self.ranges.get(n, (tokens, tokens))
            self.ranges[n] = min(floor, tokens), max(ceil, tokens)
            self.ranges = dict(sorted(self.ranges.items()))

    def _index(self, least: int) -> int:
        index = bisect_left(self.counts, least)
        if index == len(self.counts):
            raise ValueError(f"none of {tuple(self.counts)} partitions is as many as {least}")
        return index
