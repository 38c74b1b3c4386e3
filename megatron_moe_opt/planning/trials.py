"""A plan put to the test: the planned variant, stock and the runners-up each run some training steps.

Predictions of different systems rest on different models, and a model that is off by 10 % chooses by chance between
systems that are 5 % apart. What a step takes is known for certain once it has run. So a few variants run in turn, in
two sweeps, the second in the opposite order so that what drifts meanwhile favours none, and the fastest stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .planner import ALLTOALL, Prediction

MOST_TRIED = 6
STEPS = 6
"""Of a variant in a sweep. The first does not count: buffers are new, and what was sent ahead may be on its way."""
SWEEPS = 2
STOCK_WITHIN = 0.01
"""Stock stays where nothing is faster by more than this part of its time."""


def shortlist(predictions: Sequence[Prediction], planned: str) -> tuple[str, ...]:
    """What to try: the planned variant first, stock, the best of every other system, then the next fastest.

    Args:
        predictions: the fastest first.
    """
    of_systems = {one.family: one.variant for one in reversed(predictions)}.values()
    by_time = [one.variant for one in predictions]
    stock = [variant for variant in by_time if variant == ALLTOALL]
    tried = dict.fromkeys([planned, *stock, *sorted(of_systems, key=by_time.index), *by_time])
    return tuple(tried)[:MOST_TRIED]


class Trials:
    """Says what runs in the next step, and in the end what stays. The same on every rank that is told the same."""

    def __init__(self, variants: Sequence[str]) -> None:
        self.variants = tuple(variants)
        one_way = [variant for variant in variants for _ in range(STEPS)]
        self._order = [variant for sweep in range(SWEEPS) for variant in (one_way, one_way[::-1])[sweep % 2]]
        self._times: list[float] = []

    @property
    def current(self) -> str | None:
        """The variant of the next step; None: all have run."""
        return self._order[len(self._times)] if len(self._times) < len(self._order) else None

    def record(self, seconds: float) -> None:
        """The time of the step that has just run."""
        self._times.append(seconds)

    def longer_than(self, seconds: float) -> float:
        """Seconds that all steps took more than as many of `seconds` each."""
        return sum(self._times) - len(self._times) * seconds

    def medians(self) -> dict[str, float]:
        """Seconds of a step of each variant, without those that do not count."""
        of: dict[str, list[float]] = {variant: [] for variant in self.variants}
        before = None
        for variant, seconds in zip(self._order, self._times, strict=True):
            if variant == before or len(self.variants) == 1:
                of[variant].append(seconds)
            before = variant
        return {variant: statistics.median(times) for variant, times in of.items()}


def decide(seconds: dict[str, float]) -> str:
    """The fastest; stock, where nothing is faster by more than STOCK_WITHIN of its time."""
    fastest = min(seconds, key=lambda variant: seconds[variant])
    stock = seconds.get(ALLTOALL)
    return ALLTOALL if stock is not None and seconds[fastest] > stock * (1 - STOCK_WITHIN) else fastest
