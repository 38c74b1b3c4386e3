"""How many partitions, and how their memory is reused, found by trying few of both (MPMoE, section IV-A)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_moe_opt.planning.choosing.contenders import contenders
from megatron_moe_opt.planning.choosing.equal_times import fewest_of_equal
from megatron_moe_opt.planning.choosing.partition_search import BELIEVED, PARTITIONS, PartitionSearch
from megatron_moe_opt.schedules.mpmoe import NONE

Configuration = tuple[int, str]
"""(partitions n, strategy S)."""
SIMILAR = 2.0
"""Numbers of tokens within this factor share their strategy, which hardly depends on them (the paper's Fig. 15)."""
NEAR = 0.1
"""Medians that exceed the least by this part of it are compared in turns once, however sure they seem: they were
measured at other times than the least."""
FAR = 1.25
"""Times the least median: what takes longer in its first trial is believed to be slower."""
MOST_TIMES = 24
"""Of a configuration; those that are not told apart by then count as equal."""
MOST_LOST = 15.0
"""Passes of the best one that those of all others may take longer than as many of its own, before comparing ends."""
EQUAL = 0.02
"""Of medians that exceed the least by this part of it the one with the fewest partitions is taken."""


@dataclass
class ConfigurationSearch:
    """The fastest (n, S) for any number of tokens, of those that are allowed.

    Each strategy has an Algorithm 1 of its own, which begins at the fastest n so far; then all that may be the
    fastest are measured in turns, until one is left, all of them have MOST_TIMES or MOST_LOST is lost. A strategy adds
    work to `none`, and gains by smaller buffers if at all: where `none` is allowed, the others are tried with as many
    partitions as its fastest, and only the fastest of them is searched, if it is faster than that.
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
        return {strategy: n for strategy, n in least.items() if n is not None}

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
        if len(allowed) == 1:
            ((strategy, least),) = allowed.items()
            n = self.searches[strategy].known(tokens, least)
            if n is not None:  # with nothing to compare it with
                return self._settle(tokens, {strategy: least}, (n, strategy), {})
        searched = [NONE] if NONE in allowed else list(allowed)
        times: dict[Configuration, list[float]] = {}
        for strategy in searched:
            turns, found = self._search(tokens, strategy, allowed[strategy], times)
            if turns:
                return turns
            times |= found
        if NONE in allowed and len(allowed) > 1:
            for strategy in (one for one in allowed if one != NONE):
                turns, found = self._try_one(tokens, strategy, allowed[strategy], times)
                if turns:
                    return turns
                times |= found
            _, leader = contenders(times)[0]
            if leader != NONE:
                turns, found = self._search(tokens, leader, allowed[leader], times)
                if turns:
                    return turns
                times |= found
                searched.append(leader)
        choice = fastest(times)
        learning = {strategy: allowed[strategy] for strategy in (*searched, choice[1])}
        return self._compare(tokens, times) or self._settle(tokens, learning, choice, times)

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

    def _search(
        self, tokens: int, strategy: str, least: int, times: dict[Configuration, list[float]]
    ) -> tuple[tuple[Configuration, ...], dict[Configuration, list[float]]]:
        """What to measure next for one strategy's Algorithm 1; and where that is over, the times that it rests on.

        Args:
            times: of what was searched before; it begins at the fastest n of them.
        """
        search = self.searches[strategy]
        n = search.known(tokens, least)
        if n is None:
            untried = search.trial(tokens, least, contenders(times)[0][0] if times else None)
            found = search.tried(tokens, least)
        else:  # from its range, but not how it compares
            own = search.times(tokens).get(n)
            untried, found = ((n,), {}) if own is None else ((), {n: own})
        return tuple((n, strategy) for n in untried), {(n, strategy): own for n, own in found.items()}

    def _try_one(
        self, tokens: int, strategy: str, least: int, times: dict[Configuration, list[float]]
    ) -> tuple[tuple[Configuration, ...], dict[Configuration, list[float]]]:
        """What to measure to know whether a strategy may be the fastest with as many partitions as what is so far; and
        once that is known, its times, or none where it is slower.
        """
        best, search = contenders(times)[0], self.searches[strategy]
        n = search.known(tokens, least)
        one = (search.first(tokens, least, best[0]) if n is None else n), strategy
        own = search.times(tokens).get(one[0])
        if own is None:
            return (one,), {}
        if len(own) < BELIEVED and statistics.median(own) <= statistics.median(times[best]) * FAR:
            return (best, one), {}  # faster or slower, what disturbed the one may not have disturbed the other
        return (), {one: own} if one in contenders({best: times[best], one: own}) else {}

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

    def _settle(
        self,
        tokens: int,
        learning: dict[str, int],
        choice: Configuration,
        times: dict[Configuration, list[float]],
    ) -> tuple[()]:
        """Every strategy that is `learning` does so from its own times."""
        for strategy, least in learning.items():
            own = {one: seconds for one, seconds in times.items() if one[1] == strategy}
            n, _ = choice if strategy == choice[1] else fastest(own)
            self.searches[strategy].settle(tokens, least, n)
        self.chosen[tokens] = choice
        return ()

    def _strategy_of_similar(self, tokens: int) -> str | None:
        near = [other for other in self.chosen if max(tokens, other) <= SIMILAR * min(tokens, other)]
        nearest = min(near, key=lambda other: abs(math.log(other / tokens)), default=None)
        return None if nearest is None else self.chosen[nearest][1]


def fastest(times: dict[Configuration, list[float]]) -> Configuration:
    """By medians; the fewest partitions of those that are EQUAL."""
    return fewest_of_equal([(statistics.median(seconds), n, (n, s)) for (n, s), seconds in times.items()], EQUAL)
