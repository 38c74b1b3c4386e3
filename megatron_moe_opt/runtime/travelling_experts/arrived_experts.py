"""Experts that were gathered: how long they are in memory, and how autograd finds them again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_moe_opt.kernels.streams import used_here
from megatron_moe_opt.runtime.engine.recomputation import Hooks
from megatron_moe_opt.runtime.engine.started import Running


@dataclass(frozen=True)
class Arriving:
    """Waits for what was started, on the current stream or in the queue that asks, and returns what it brings."""

    running: Running
    brings: list[torch.Tensor]
    """The tensor that is brought, alone in this list at the latest when it has run."""

    def __call__(self) -> torch.Tensor:
        self.running.wait()
        return used_here(self.brings[0])


class ArrivedExperts:
    """Experts of other ranks that were sent here; those that were dropped are brought again."""

    def __init__(self, bring: Callable[[], Callable[[], torch.Tensor]]) -> None:
        """
        Args:
            bring: starts to bring the experts here, and again where they were dropped; see ExpertCommunicator.gather.
        """
        self._bring = bring
        self.arrive: Callable[[], torch.Tensor] | None = None
        """Waits for them, [owners, numel]; None: they are neither here nor on their way."""
        self._experts: weakref.ref[torch.Tensor] | None = None

    def experts(self) -> torch.Tensor:
        """Waits for the experts and returns them, [owners, numel]: see MigratedExperts.gathered."""
        experts = self.arrive()
        self._experts = weakref.ref(experts)
        return experts

    def drop(self) -> None:
        """Lets go of the experts, so that their memory is free until `begin`."""
        self.arrive = None

    def begin(self) -> None:
        """Starts to bring them if they are not here: as they were sent. May be a collective call, then."""
        if self.arrive is None:
            self.arrive = self._bring()

    def part(self, tensor: torch.Tensor) -> _Part | None:
        """Returns where among the experts a tensor lies; None, if it is none of them."""
        experts = self._experts and self._experts()
        if experts is None or tensor.untyped_storage()._cdata != experts.untyped_storage()._cdata:
            return None
        return _Part(self, tensor.storage_offset() - experts.storage_offset(), tensor.size(), tensor.stride())

    def hooks(self, outer: Hooks | None = None) -> saved_tensors_hooks:
        """Returns a context in which autograd saves of these experts where they lie, and so does not hold them.

        Args:
            outer: the hooks that keep all other tensors; None: autograd itself does.
        """
        # An output itself would keep the graph alive that saves it.
        save, restore = outer or (torch.Tensor.detach, lambda saved: saved)
        return saved_tensors_hooks(
            lambda tensor: self.part(tensor) or save(tensor),
            lambda saved: restore_part(saved) if isinstance(saved, _Part) else restore(saved),
        )


@dataclass(frozen=True)
class _Part:
    """A tensor in the memory of experts that need not be there now."""

    arrived: ArrivedExperts
    first: int
    size: torch.Size
    stride: tuple[int, ...]


def restore_part(part: Any) -> Any:
    """Returns what was saved: where it was a part, the tensor in the experts as they are now."""
    if not isinstance(part, _Part):
        return part
    experts = part.arrived.experts()
    return experts.as_strided(part.size, part.stride, experts.storage_offset() + part.first)


@dataclass(frozen=True)
class BorrowedExperts:
    """Other ranks' experts, as one pass has them. Their gradients go elsewhere: see MigratedExperts.stand_ins."""

    arrived: ArrivedExperts
    views: Callable[[torch.Tensor], Iterator[torch.Tensor]]
    """The other owners' parameters in the experts [owners, numel]: the same memory."""

    def parameters(self) -> list[torch.Tensor]:
        """Waits for the parameters, and returns them without a graph."""
        return [*self.views(self.arrived.experts())]

    def part(self, tensor: torch.Tensor) -> _Part | None:
        """Returns what to save for backward in the place of a tensor that is a part of these; None: it is none."""
        return self.arrived.part(tensor)


class Residents:
    """Keeps the experts of other ranks here, at most those of so many layers: those that were used last.

    All ranks use the same ones in the same order, and so drop the same. One that nobody holds any more counts until
    its turn comes: on some ranks it may still be there.
    """

    def __init__(self, limit: int | None) -> None:
        """
        Args:
            limit: None: no limit.
        """
        self.limit = limit
        self._recent: list[weakref.ref[ArrivedExperts]] = []

    def use(self, arrived: ArrivedExperts) -> None:
        """Has experts here or on their way. A collective call, where they are not."""
        self.leave(arrived)
        if self.limit is not None:
            self._recent.append(weakref.ref(arrived))
        while len(self._recent) > (self.limit or 0):
            oldest = self._recent.pop(0)()
            if oldest is not None:
                oldest.drop()
        arrived.begin()

    def leave(self, arrived: ArrivedExperts | None) -> None:
        """Counts these experts no more; None: none at all."""
        self._recent = [one for one in self._recent if arrived is None or one() is not arrived]
