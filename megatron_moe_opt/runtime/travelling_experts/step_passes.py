"""The passes that a layer has in a step: weights are the same in all, and gradients must be where they are needed after
the last one.

Who runs the micro-batches of a step says how many there are. Where nobody does, every pass is a step of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from megatron_moe_opt.errors import ConfigurationError


@dataclass(frozen=True)
class TrainedModel:
    """The model that an optimizer trains: a process may have several, whose steps are none of each other's."""

    number: int
    """What tells it from the others of this process."""
    has: Callable[[nn.Module], bool]
    """Whether a module is a part of it."""


class Deferring(Protocol):
    """A layer that may have its gradients wait for a later pass."""

    def forget_deferred(self) -> None:
        """Drops the gradients that wait for a later pass."""


class StepPasses:
    """The passes of one step. All ranks have as many of each layer, in the same order."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self._begun: WeakKeyDictionary[Deferring, int] = WeakKeyDictionary()
        self._returned: WeakKeyDictionary[Deferring, int] = WeakKeyDictionary()
        self._deferring: WeakSet[Deferring] = WeakSet()

    def begin(self, layer: Deferring) -> int:
        """Returns the number of a layer's forward pass that begins, counted from 1."""
        self._begun[layer] = number = self._begun.get(layer, 0) + 1
        return number

    def has_begun(self, layer: Deferring) -> bool:
        """Whether a layer has had its first forward pass, or is in it."""
        return layer in self._begun

    def defers(self, layer: Deferring, limit: int | None) -> bool:
        """Whether the gradients of a layer's present backward pass wait for a later one. To be asked once a pass.

        Args:
            limit: of the layers that may have gradients wait; None: no limit.
        """
        self._returned[layer] = passes = self._returned.get(layer, 0) + 1
        if passes >= self.micro_batches:
            self._deferring.discard(layer)
            return False
        if limit is None or len(self._deferring) < limit:
            self._deferring.add(layer)
        return layer in self._deferring

    def end(self) -> bool:
        """Forgets the gradients that still wait. Returns whether there were none."""
        waiting = [*self._deferring]
        for layer in waiting:
            layer.forget_deferred()
        return not waiting


_step: StepPasses | None = None


def current_step() -> StepPasses | None:
    """Returns the step that is under way; None: nobody has said how many passes it has."""
    return _step


@contextmanager
def step_of(micro_batches: int) -> Iterator[None]:
    """Runs a step inside the context, of so many backward passes of each layer or more.

    Raises:
        ConfigurationError: a layer had fewer, so that its gradients are not where they are needed.
    """
    global _step
    _step = step = StepPasses(micro_batches)
    is_complete = False
    try:
        yield
        is_complete = True
    finally:
        _step = None
        if not step.end() and is_complete:
            raise ConfigurationError(
                f"a MoE layer had fewer backward passes than its step has micro-batches, {micro_batches}: gradients of "
                "experts that travel were not returned; take --moe-opt-domain-sizes 1, where none travels, or monta"
            )
