"""Whether a choice still rests on what it was made by: steps that take another time than after the trials, and a router
that had learnt nothing.

A step's time alone says little: any may be disturbed. So medians of WINDOW steps are compared, with that of the first
WINDOW steps after the choice, which were timed in the same way. Where they differ, up or down, something has changed
(routing, lengths, a neighbour on the network), and another variant may be the fastest now. A choice is made anew
besides when routers have learnt, after 1,000 steps, 10,000 and so on: in the step that the first one was planned by,
and in its trials, they sent tokens where chance had put their weights; and that another variant has become faster does
not show in the time of what runs. Plans and trials cost time, and on a machine that keeps changing they would be made
again and again: they are when they have become cheap beside the training since the last ones.
"""

from __future__ import annotations

import statistics

WINDOW = 100
"""The number of steps of which a median is taken."""
DRIFT = 0.25
"""The part of a step's time by which medians differ where something has changed."""
MOST_COST = 0.01
"""The largest part of the time since a choice that the choice may have cost when the next one is made."""
LEARNT = 1000
"""The number of steps from which on a run's first choice is made anew: routers have learnt by then."""


def first_look(trained: int) -> int:
    """Returns after how many steps a run's first choice is made anew: the first of LEARNT, 10 LEARNT, 100 LEARNT and so
    on that is more than the steps that the model has been trained for.
    """
    look = LEARNT
    while look <= trained:
        look *= 10
    return look


class Drift:
    """Watches the steps after a choice. The same on every rank that is told the same medians."""

    def __init__(self, cost: float, look: int) -> None:
        """Begins with the step after the choice.

        Args:
            cost: seconds that planning has taken, and trials longer than as many steps of what was chosen.
            look: steps from which on the choice is made anew in any case.
        """
        self.usual: float | None = None
        """Seconds of a step after the choice; None: not yet known."""
        self._cost, self._look = cost, look
        self._since, self._steps = 0.0, 0
        self._seconds: list[float] = []

    @property
    def next_look(self) -> int:
        """Returns `look` for the choice after this one."""
        return self._look * 10 if self._steps >= self._look else self._look

    def record(self, seconds: float) -> float | None:
        """Takes the time of a step on this rank; 0: no layer has run in it, as it was another model's. Returns the
        median of a window that it completes, without such steps; 0: there were no others.
        """
        self._seconds.append(seconds)
        if len(self._seconds) < WINDOW:
            return None
        timed, self._seconds = [one for one in self._seconds if one], []
        return statistics.median(timed) if timed else 0.0

    def why_over(self, median: float) -> str | None:
        """Returns why the choice is to be made anew, in words; None: it stays.

        Args:
            median: of the window that has just ended, the same on all ranks; 0: it tells nothing.
        """
        if not median:
            return None
        self._since, self._steps = self._since + WINDOW * median, self._steps + WINDOW
        if self.usual is None:
            self.usual = median
        if self._cost > MOST_COST * self._since:
            return None
        ratio = median / self.usual
        if not 1 / (1 + DRIFT) <= ratio <= 1 + DRIFT:
            return f"a step takes {median * 1e3:.1f} ms, {ratio:.2f} of what it took then"
        if self._steps >= self._look:
            return f"routers have learnt for {self._steps} steps since"
        return None
