"""How long training steps take on this rank, from where gradients are cleared to the end of the optimizer's."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_moe_opt.runtime.travelling_experts.step_passes import current_step


class StepClock:
    """Times one step after another, of which it is told where they begin and end.

    Experts that travel may leave when gradients are cleared, before any layer runs: so a step begins there. In a loop
    that clears none, or where an evaluation came between, it begins with its first layer.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        """
        Args:
            now: returns the seconds at which a step begins, when the device has done what came before.
        """
        self._now = now
        self.began: float | None = None
        """When the step that is under way did; None: no layer has run in it yet."""
        self._cleared: float | None = None
        """When gradients were cleared for the step to come; None: they were not, or other passes came between."""
        self._micro_batches = 0
        """Of the step that is under way, or was the last."""
        self._timed_as = 0
        """Micro-batches of the first step that was timed: all times are given for as many. 0: there was none."""

    def gradients_cleared(self) -> None:
        """To be called when gradients are; for an optimizer that consists of others, several times a step."""
        if self.began is None and self._cleared is None:
            self._cleared = self._now()

    def layer_begins(self, is_training: bool) -> None:
        """To be called before every pass of a layer."""
        if not is_training:
            self._cleared = None
        elif self.began is None:
            self.began = self._now() if self._cleared is None else self._cleared
            step = current_step()
            self._micro_batches = 1 if step is None else step.micro_batches
            self._timed_as = self._timed_as or self._micro_batches

    def others_step_ended(self) -> None:
        """To be called when the step of another model has ended, whose time is not that of the next one's."""
        self._cleared = None

    def forget(self) -> None:
        """What has run so far is part of no step that is timed."""
        self.began = self._cleared = None

    def take(self) -> float:
        """Returns the seconds of the step that ends, as if it had the micro-batches of the first, for a batch may be
        ramped up; 0 where no layer has run.
        """
        began = self.began
        self.forget()
        return 0.0 if began is None else (time.perf_counter() - began) * self._timed_as / self._micro_batches
