"""How many partitions, and how their memory is reused, found by trying few of both (MPMoE, section IV-A)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .contenders import contenders
from .equal_times import fewest_of_equal
from .partition_search import PARTITIONS, PartitionSearch

Configuration = tuple[int, str]
"""(partitions n, strategy S)."""
SIMILAR = 2.0
"""Numbers of tokens within this factor share their strategy, which hardly depends on them (the paper's Fig. 15)."""
NEAR = 0.1
"""Medians that exceed the least by this part of it are compared in turns once, however sure they seem: they were
measured at other times than the least."""
MOST_TIMES = 24
"""Of a configuration; those that are not told apart by then count as equal."""
MOST_LOST = 15.0
"""Passes of the best one that those of all others may take longer than as many of its own, before comparing ends."""
EQUAL = 0.02
"""Of medians that exceed the least by this part of it the one with the fewest partitions is taken."""


@dataclass
class ConfigurationSearch:
    """The fastest (n, S) for any number of tokens, of those that are allowed.

    Each strategy has an Algorithm 1 of its own, which begins where the one before ended; then all that may be the
    fastest are measured in turns, until one is left, all of them have MOST_TIMES or MOST_LOST is lost. A strategy only
    adds work to `none`: where `none` is allowed, nothing else is tried.
    """

    strategies: Sequence[str]
    """To choose from."""
    least_partitions: Callable[[int, str], int | None]
    """Of (tokens, strategy): the fewest partitions that are allowed, such as by memory; None: no number is."""
    counts: Sequence[int] = PARTITIONS
    chosen: dict[int, Configuration] = field(default_factory=dict, init=False)
    """By number of tokens."""
    searches: dict[str, PartitionSearch] = field(init=False)
    _compared: set[int] = field(default_factory=set, init=False)
    """Numbers of tokens whose NEAR ones were measured in turns."""

    def __post_init__(self) -> None:
        self.searches = {strategy: PartitionSearch(self.counts) for strategy in self.strategies}

    def allowed(self, tokens: int) -> dict[str, int]:
        """The strategies to choose from, and the fewest partitions of each; empty where nothing is allowed."""
        least = {strategy: self.least_partitions(tokens, strategy) for strategy in self.strategies}
        allowed = {strategy: n for strategy, n in least.items() if n is not None}
        return {"none": allowed["none"]} if "none" in allowed else allowed

    def trial(self, tokens: int) -> tuple[Configuration, ...]:
        """What to measure next, in turns; nothing: `chosen` holds the choice for so many tokens.

        Raises:
            LookupError: nothing is allowed.
        """
        if tokens in self.chosen:
            return ()
        allowed = self.allowed(tokens)
        if not allowed:
            raise LookupError(f"no strategy is allowed for {tokens} tokens")
        known = self._strategy_of_similar(tokens)
        if known in allowed:
            allowed = {known: allowed[known]}
        times: dict[Configuration, list[float]] = {}
        start: int | None = None
        for strategy, least in allowed.items():
            search = self.searches[strategy]
            n = search.known(tokens, least)
            if n is None:
                untried = search.trial(tokens, least, start)
                if untried:
                    return tuple((n, strategy) for n in untried)
                of_strategy = search.tried(tokens, least)
                start = contenders(of_strategy)[0]
            elif len(allowed) == 1:
                return self._settle(tokens, allowed, (n, strategy))
            elif n not in search.times(tokens):
                return ((n, strategy),)  # known from its range, but not how it compares
            else:
                of_strategy, start = {n: search.times(tokens)[n]}, n
            times |= {(n, strategy): seconds for n, seconds in of_strategy.items()}
        return self._compare(tokens, times) or self._settle(tokens, allowed, fastest(times))

    def measured(self, tokens: int, configuration: Configuration, seconds: Sequence[float]) -> None:
        """What passes took."""
        partitions, strategy = configuration
        self.searches[strategy].measured(tokens, partitions, seconds)

    def seconds(self, tokens: int) -> dict[Configuration, float]:
        """The medians of what was measured for so many tokens."""
        return {
            (n, strategy): statistics.median(times)
            for strategy, search in self.searches.items()
            for n, times in search.times(tokens).items()
        }

    def _compare(self, tokens: int, times: dict[Configuration, list[float]]) -> tuple[Configuration, ...]:
        """Those that have to be measured once more before one of them can be taken."""
        if len(times) == 1:
            return ()
        medians = {one: statistics.median(seconds) for one, seconds in times.items()}
        least = min(medians.values())
        if sum(len(times[one]) * (medians[one] / least - 1) for one in times) > MOST_LOST:
            return ()
        if tokens not in self._compared:
            self._compared.add(tokens)
            near = tuple(one for one in times if medians[one] <= least * (1 + NEAR))
            return near if len(near) > 1 else ()
        left = contenders(times)
        return left if len(left) > 1 and min(len(times[one]) for one in left) < MOST_TIMES else ()

    def _settle(self, tokens: int, allowed: dict[str, int], choice: Configuration) -> tuple[()]:
        """Every strategy learns from its own times."""
        for strategy, least in allowed.items():
            search = self.searches[strategy]
            if strategy == choice[1]:
                search.settle(tokens, least, choice[0])
            elif tried := search.tried(tokens, least):
                search.settle(tokens, least, fastest({(n, strategy): times for n, times in tried.items()})[0])
        self.chosen[tokens] = choice
        return ()

    def _strategy_of_similar(self, tokens: int) -> str | None:
        near = [other for other in self.chosen if max(tokens, other) <= SIMILAR * min(tokens, other)]
        nearest = min(near, key=lambda other: abs(math.log(other / tokens)), default=None)
        return None if nearest is None else self.chosen[nearest][1]


def fastest(times: dict[Configuration, list[float]]) -> Configuration:
    """By medians; the fewest partitions of those that are EQUAL."""
    return fewest_of_equal([(statistics.median(seconds), n, (n, s)) for (n, s), seconds in times.items()], EQUAL)
