"""Which of several candidates may still be the fastest, by the times that each has taken so far.

A median of few noisy times says little, and a least of several medians less: it is the luckiest. So a candidate has an
interval of times in which its true median lies, from its own sorted times alone, whatever their distribution: of n
independent times as many as n/2 +- sqrt(n) exceed the true median in 95 of 100 cases. More times make it narrower. A
single disturbed time is at the end of the order and moves nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from math import floor, sqrt
from typing import TypeVar

WORTH = 0.01
"""The part of its time by which something has to be faster to be worth more trials."""

K = TypeVar("K", bound=Hashable)


def median_within(times: Sequence[float]) -> tuple[float, float]:
    """Returns the two of its times between which a candidate's true median lies: of few times, least and largest."""
    ordered = sorted(times)
    outside = max(0, floor(len(ordered) / 2 - sqrt(len(ordered))))
    return ordered[outside], ordered[-1 - outside]


def contenders(times: Mapping[K, Sequence[float]]) -> tuple[K, ...]:
    """Returns the leader, which is the candidate with the least median, and all that may be faster than it by more than
    WORTH.

    The same wherever the same times are given in the same order.

    Args:
        times: of each candidate in seconds, at least one.

    Returns:
        By their medians, the leader first; it alone, where no trial is worth it any more.
    """
    by_median = sorted(times, key=lambda one: statistics.median(times[one]))
    leader, *others = by_median
    _, at_most = median_within(times[leader])
    return leader, *(one for one in others if median_within(times[one])[0] < at_most * (1 - WORTH))
