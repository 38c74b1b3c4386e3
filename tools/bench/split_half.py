"""What of a regret is noise: one half of the rounds to choose by, the other half to judge by.

The fastest of many medians is a lucky one, so that regret against it is too large, even that of the truly fastest. In
two halves of the rounds luck differs: every second round chooses the fastest, the others say what it takes. Halves are
noisier than the whole, so what is seen here is more than the noise of the whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

Rounds = Mapping[str, Sequence[float]]
"""Seconds of each round, by candidate; as many of each."""


def noise_floor(rounds: Rounds) -> float | None:
    """Returns the regret of choosing the fastest by one half, judged by the other: mean of both ways. None: one round
    only.
    """
    return _mean(judge[fastest] / min(judge.values()) - 1 for fastest, judge in _halves(rounds))


def regret_of_halves(rounds: Rounds, chosen: str) -> float | None:
    """Returns the time of the chosen over that of the fastest by one half, less 1, both by the other half: mean of both
    ways.

    No least of noisy times is in it, so that the truly fastest has 0 in the mean; negative where it was taken for
    slower. None: one round only.
    """
    return _mean(judge[chosen] / judge[fastest] - 1 for fastest, judge in _halves(rounds))


def _halves(rounds: Rounds) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the fastest by the medians of one half, and the medians of the other; of both ways."""
    if min(map(len, rounds.values())) < 2:
        return
    odd, even = (
        {candidate: statistics.median(seconds[first::2]) for candidate, seconds in rounds.items()} for first in (0, 1)
    )
    for choose, judge in ((odd, even), (even, odd)):
        yield min(choose, key=choose.__getitem__), judge


def _mean(values: Iterator[float]) -> float | None:
    both = list(values)
    return statistics.mean(both) if both else None
