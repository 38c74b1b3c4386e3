"""Whether a choice still rests on what it was made by: steps that take another time than after the trials.

A step's time alone says little: any may be disturbed. So medians of WINDOW steps are compared, with that of the first
WINDOW steps after the choice, which were timed in the same way. Where they differ, up or down, something has changed
(routing, lengths, a neighbour on the network), and another variant may be the fastest now. Trials cost time, and on a
machine that keeps changing they would begin again and again: they do when they have become cheap beside the training
since the last ones.
"""

from __future__ import annotations

import statistics

WINDOW = 100
"""Steps of which a median is taken."""
DRIFT = 0.25
"""The part of a step's time by which medians differ where something has changed."""
MOST_COST = 0.01
"""The part of the time since a choice that the trials before it may have cost, when the next ones begin."""


class Drift:
    """Watches the steps after a choice. The same on every rank that is told the same medians."""

    def __init__(self, cost: float) -> None:
        """Begins with the step after the choice.

        Args:
            cost: seconds that the trials have taken longer than as many steps of what was chosen.
        """
        self.usual: float | None = None
        """Seconds of a step after the choice; None: not yet known."""
        self._cost = cost
        self._since = 0.0
        self._seconds: list[float] = []

    def record(self, seconds: float) -> float | None:
        """Takes the time of a step on this rank. Returns the median of a window that it completes."""
        self._seconds.append(seconds)
        if len(self._seconds) < WINDOW:
            return None
        median, self._seconds = statistics.median(self._seconds), []
        return median

    def is_over(self, median: float) -> bool:
        """Whether the choice is to be made anew.

        Args:
            median: of the window that has just ended, the same on all ranks.
        """
        self._since += WINDOW * median
        if self.usual is None:
            self.usual = median
            return False
        ratio = median / self.usual if self.usual > 0 else 1.0
        return not 1 / (1 + DRIFT) <= ratio <= 1 + DRIFT and self._cost <= MOST_COST * self._since
