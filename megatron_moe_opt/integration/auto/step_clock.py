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

    def __init__(self, now: Callable[[], float], stages: int = 1, chunks: int = 1) -> None:
        """
        Args:
            now: returns the seconds at which a step begins, when the device has done what came before.
            stages: of the pipeline.
            chunks: parts of the model on each of them, virtual stages.
        """
        self._now, self._stages, self._chunks = now, stages, chunks
        self.began: float | None = None
        """The time at which the step under way began; None: no layer has run in it yet."""
        self._cleared: float | None = None
        """When gradients were cleared for the step to come; None: they were not, or other passes came between."""
        self._passes_ended: float | None = None
        """When the passes of the step under way ended; None: they have not, or nobody says."""
        self._micro_batches = 0
        """The micro-batches of the step that is under way, or was the last."""
        self._timed_as = 0
        """Micro-batches of the first step that was timed: all times are given for as many. 0: there was none."""

    def gradients_cleared(self) -> None:
        """Notes that gradients are cleared, where a step may begin. An optimizer that consists of others does
        so several times a step.
        """
        if self.began is None and self._cleared is None:
            self._cleared = self._now()

    def layer_begins(self, is_training: bool) -> None:
        """Notes that a pass of a layer begins; called before every one."""
        if not is_training:
            self._cleared = None
        elif self.began is None:
            self.began = self._now() if self._cleared is None else self._cleared
            step = current_step()
            self._micro_batches = 1 if step is None else step.micro_batches
            self._timed_as = self._timed_as or self._micro_batches

    def passes_end(self) -> None:
        """Notes that the passes of a step have ended. What follows, the optimizer's part, takes as long for a batch of
        any size. It may be called again in a step, and where none is under way.
        """
        if self.began is not None:
            self._passes_ended = self._now()

    def others_step_ended(self) -> None:
        """Forgets when gradients were cleared: another model's step has ended, whose time is not the next step's."""
        self._cleared = None

    def forget(self) -> None:
        """Leaves out of all timed steps what has run so far."""
        self.began = self._cleared = self._passes_ended = None

    def take(self) -> float:
        """Returns the seconds of the step that ends, as if it had as many passes as the first, for batches may be
        ramped up; 0 where no layer has run.
        """
        began, passes_ended, ends = self.began, self._passes_ended, time.perf_counter()
        self.forget()
        if began is None:
            return 0.0
        passes_ended = ends if passes_ended is None else passes_ended
        turns = self._turns(self._timed_as) / self._turns(self._micro_batches)
        return (passes_ended - began) * turns + ends - passes_ended

    def _turns(self, micro_batches: int) -> int:
        """Returns how long a step of so many takes, in passes of one chunk: a pipeline fills and drains besides."""
        return micro_batches * self._chunks + self._stages - 1
