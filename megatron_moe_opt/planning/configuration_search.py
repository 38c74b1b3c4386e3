"""How many partitions, and how their memory is reused, found by trying few of both (MPMoE, section IV-A)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .partition_search import PARTITIONS, PartitionSearch

Configuration = tuple[int, str]
"""(partitions n, strategy S)."""
SIMILAR = 2.0
"""Numbers of tokens within this factor share their strategy, which hardly depends on them (the paper's Fig. 15)."""


@dataclass
class ConfigurationSearch:
    """The fastest (n, S) for any number of tokens, of those that are allowed.

    Each strategy has an Algorithm 1 of its own, which begins where the one before ended; then their times are compared.
    A strategy only adds work to `none`: where `none` is allowed, nothing else is tried.
    """

    strategies: Sequence[str]
    """To choose from."""
    least_partitions: Callable[[int, str], int | None]
    """Of (tokens, strategy): the fewest partitions that are allowed, such as by memory; None: no number is."""
    counts: Sequence[int] = PARTITIONS
    chosen: dict[int, Configuration] = field(default_factory=dict, init=False)
    """By number of tokens."""
    searches: dict[str, PartitionSearch] = field(init=False)

    def __post_init__(self) -> None:
        self.searches = {strategy: PartitionSearch(self.counts) for strategy in self.strategies}

    def allowed(self, tokens: int) -> dict[str, int]:
        """The strategies to choose from, and the fewest partitions of each; empty where nothing is allowed."""
        least = {strategy: self.least_partitions(tokens, strategy) for strategy in self.strategies}
        allowed = {strategy: n for strategy, n in least.items() if n is not None}
        return {"none": allowed["none"]} if "none" in allowed else allowed

    def trial(self, tokens: int) -> Configuration | None:
        """What to measure next; None: `chosen` holds the choice for so many tokens.

        Raises:
            LookupError: nothing is allowed.
        """
        if tokens in self.chosen:
            return None
        allowed = self.allowed(tokens)
        if not allowed:
            raise LookupError(f"no strategy is allowed for {tokens} tokens")
        known = self._strategy_of_similar(tokens)
        if known in allowed:
            allowed = {known: allowed[known]}
        start: int | None = None
        for strategy, least in allowed.items():
            search = self.searches[strategy]
            untried = search.trial(tokens, least, start)
            start = untried or search.best(tokens, least)
            if untried is None and len(allowed) > 1 and start not in search.seconds(tokens):
                untried = start  # known from its range, but not how it compares
            if untried is not None:
                return untried, strategy
        best = {strategy: self.searches[strategy].best(tokens, least) for strategy, least in allowed.items()}
        times = {strategy: self.searches[strategy].seconds(tokens).get(n, math.inf) for strategy, n in best.items()}
        strategy = min(times, key=lambda strategy: times[strategy])
        self.chosen[tokens] = best[strategy], strategy
        return None

    def measured(self, tokens: int, configuration: Configuration, seconds: float) -> None:
        """What a trial took."""
        partitions, strategy = configuration
        self.searches[strategy].measured(tokens, partitions, seconds)

    def seconds(self, tokens: int) -> dict[Configuration, float]:
        """What was measured for so many tokens."""
        return {
            (n, strategy): seconds
            for strategy, search in self.searches.items()
            for n, seconds in search.seconds(tokens).items()
        }

    def _strategy_of_similar(self, tokens: int) -> str | None:
        near = [other for other in self.chosen if max(tokens, other) <= SIMILAR * min(tokens, other)]
        nearest = min(near, key=lambda other: abs(math.log(other / tokens)), default=None)
        return None if nearest is None else self.chosen[nearest][1]
