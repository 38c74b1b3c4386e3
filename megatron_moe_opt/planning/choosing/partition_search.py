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

from megatron_moe_opt.planning.choosing.contenders import contenders

PARTITIONS = (1, 2, 3, 4, 5, 6, 7, 8)
"""To choose from: the paper's 2 to 8, and not to cut at all."""
BELIEVED = 6
"""Times of an n after which it is believed to be slower than another one."""


@dataclass
class PartitionSearch:
    """Which numbers of partitions to try for any number of tokens, for one way of keeping memory.

    Ask `trial` what to measure, tell `measured` how long that took, until there is nothing to measure; then choose one
    of `tried` and tell `settle`. Everything follows from what is told, so that ranks that are told alike try alike.

    Raises:
        ValueError: counts that are not ascending, or none.
    """

    counts: Sequence[int] = PARTITIONS
    """Numbers of partitions to choose from, ascending."""
    believed: int = BELIEVED
    """Times of an n after which it is believed to be slower; 1: whoever measures has seen to it."""
    ranges: dict[int, tuple[float, float]] = field(init=False)
    """G: (least, greatest) number of tokens that n is known to be best for, by n; ascending in both."""
    chosen: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    """C: n by tokens and the least n that was allowed."""
    _times: dict[int, dict[int, list[float]]] = field(default_factory=dict, init=False)
    """Measured seconds, by tokens and by n."""

    def __post_init__(self) -> None:
        if not self.counts or any(one >= other for one, other in pairwise(self.counts)):
            raise ValueError(f"numbers of partitions {tuple(self.counts)} do not ascend")
        fewest, most = self.counts[0], self.counts[-1]
        self.ranges = {fewest: (0, 1), most: (math.inf, math.inf)} if fewest < most else {most: (0, math.inf)}

    def known(self, tokens: int, least: int = 1) -> int | None:
        """The number of partitions, where it follows from what was settled; None: it has to be searched for.

        Args:
            least: fewer partitions are not allowed, say for the memory that they take.

        Raises:
            ValueError: no number of partitions is as large as `least`.
        """
        least = self.counts[self._index(least)]
        if (tokens, least) in self.chosen:
            return self.chosen[tokens, least]
        low, high = self._bounds(tokens)
        if high <= least:  # past the best one, time only rises
            return least
        return low if low == high else None

    def trial(self, tokens: int, least: int = 1, start: int | None = None) -> tuple[int, ...]:
        """The numbers of partitions to measure next, in turns; none: the search is over (searchBestGran).

        It goes upwards from `start` to the turning point, and downwards too, unless time has only fallen. What may be
        as fast as the best so far is no turning point. Nor is what was measured but once: that and the best so far are
        measured again, in turns, so that what disturbs the one disturbs the other.

        Args:
            least: as in `known`, which must be None.
            start: where to begin, such as at the best n of a similar search; None: at the fewest.
        """
        counts, first = self._between(tokens, least, start)
        times = self._times.get(tokens, {})
        seen: dict[int, list[float]] = {}
        for direction in (counts[first:], counts[first::-1]):
            for n in direction:
                if n not in times:
                    return (n,)
                seen[n] = times[n]
                fast = contenders(seen)
                if n not in fast:
                    if len(times[n]) < self.believed:
                        return fast[0], n
                    break
            if counts[first] not in contenders(seen):
                break  # it has fallen on this side, so it rises on the other
        return ()

    def first(self, tokens: int, least: int = 1, start: int | None = None) -> int:
        """The number of partitions that `trial` measures first."""
        counts, first = self._between(tokens, least, start)
        return counts[first]

    def measured(self, tokens: int, partitions: int, seconds: Sequence[float]) -> None:
        """Takes the seconds of passes of `tokens` tokens in so many partitions; later times add to earlier ones."""
        self._times.setdefault(tokens, {}).setdefault(partitions, []).extend(seconds)

    def times(self, tokens: int) -> dict[int, list[float]]:
        """All that was measured for so many tokens, in seconds by number of partitions."""
        return self._times.get(tokens, {})

    def tried(self, tokens: int, least: int = 1) -> dict[int, list[float]]:
        """Of `times`, those that may be chosen, by ascending number of partitions."""
        low, high = self._bounds(tokens)
        return {n: times for n, times in sorted(self.times(tokens).items()) if max(low, least) <= n <= high}

    def settle(self, tokens: int, least: int, n: int) -> None:
        """Lines 19 to 24: n is the choice, of those from `least` on.

        Where a smaller n was not allowed, the best of the others says nothing about other tokens.
        """
        least = self.counts[self._index(least)]
        if (tokens, least) in self.chosen:
            return
        low, high = self._bounds(tokens)
        self.chosen[tokens, least] = n
        if high > least and (least <= low or n > least):
            floor, ceil = self.ranges.get(n, (tokens, tokens))
            self.ranges[n] = min(floor, tokens), max(ceil, tokens)
            self.ranges = dict(sorted(self.ranges.items()))

    def _between(self, tokens: int, least: int, start: int | None) -> tuple[list[int], int]:
        """The n that a search is between, and the index of the one that it begins at."""
        low, high = self._bounds(tokens)
        counts = [n for n in self.counts if max(low, least) <= n <= high]
        return counts, min(bisect_left(counts, start), len(counts) - 1) if start is not None else 0

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

    def _index(self, least: int) -> int:
        index = bisect_left(self.counts, least)
        if index == len(self.counts):
            raise ValueError(f"none of {tuple(self.counts)} partitions is as many as {least}")
        return index
