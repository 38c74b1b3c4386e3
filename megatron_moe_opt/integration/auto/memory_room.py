"""Whether a rank's GPU has room for what a variant takes besides what ran in the step that was looked at.

A rank that runs out of memory in a pass leaves the others in a collective, and the job ends. So what a variant is
predicted to take is held against what was free in that step, and before its first turn it is allocated on every rank
and given back: where one cannot, all ranks drop the variant, between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_moe_opt.topology.process_groups import COMMUNICATOR_BYTES

MOST_OF_FREE = 0.8
"""The part of the memory free at a step's peak that may be planned with: other steps, and fragments, may take more."""


class Above(NamedTuple):
    """The bytes that a layer holds under a variant beyond what it held."""

    of_pass: int
    """For each pass under way."""
    of_others: int
    """Of other ranks' experts, however many passes are under way."""

    def of(self, passes: int, layers: int) -> int:
        """Returns the bytes of so many layers with so many passes under way in all."""
        return passes * self.of_pass + layers * self.of_others


@dataclass(frozen=True)
class Room:
    """The memory of a rank's GPU, in bytes, as a step under a known variant showed it."""

    free: int
    """The bytes that nothing held when most was in use."""
    at_work: int
    """The bytes that were then in use besides what stays between steps."""
    passes: int
    """The passes of MoE layers whose activations were then held."""
    layers: int
    """The MoE layers of the rank."""

    @property
    def spare(self) -> int:
        """Returns the part of `free` that may be planned with, in bytes."""
        return int(self.free * MOST_OF_FREE)

    def has(self, above: Above, communicators: int) -> bool:
        """Whether all layers may hold so much more, beside so many new communicators."""
        return not self.passes or _taken(above.of(self.passes, self.layers), communicators) <= self.spare

    def needed(self, above: int, communicators: int) -> int:
        """Returns the bytes that have to be free between two steps for a step that holds so many more in all; 0: it
        takes nothing besides.
        """
        taken = _taken(above, communicators)
        return self.at_work + int(taken / MOST_OF_FREE) if taken else 0


def _taken(above: int, communicators: int) -> int:
    return above + communicators * COMMUNICATOR_BYTES


def count_peak_anew() -> None:
    """Has `room` tell of the steps from here on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def give_back() -> None:
    """Gives the GPU what PyTorch keeps unused: that of streams of variants that have lost no other stream gets."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class InUse(NamedTuple):
    """The bytes of a rank's GPU that PyTorch has given out."""

    most: int
    """At most since they are counted."""
    now: int


def in_use() -> InUse | None:
    """Returns what is in use on this rank's GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    return InUse(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())


def room(passes: int, layers: int, after_passes: InUse | None = None, later: int = 0) -> Room | None:
    """Returns the memory of this rank's GPU, asked between two steps; None without a GPU: a host's memory may be
    swapped.

    Args:
        passes, layers: see Room.
        after_passes: what was in use before the optimizer's step, whose first one makes its states: from the next step
            on they are there in all passes. None: not known.
        later: the passes that are held when batches have been ramped up, where these are more: the room is that of
            steps with as many, whose passes are taken to hold all that those of this one held besides what stays.
    """
    in_step = in_use()
    if in_step is None:
        return None
    most, now = in_step
    if after_passes is not None:
        most = max(most, after_passes.most + now - after_passes.now)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - most
    at_work, later = most - now, max(later, passes)
    grown = at_work * later // passes if passes else at_work
    return Room(free - (grown - at_work), grown, later, layers)


def could_take(size: int) -> bool:
    """Whether this rank's GPU gives so many bytes now.

    They go back to the GPU, with all that PyTorch keeps: NCCL takes its buffers from what PyTorch does not.
    """
    try:
        torch.empty(size, dtype=torch.uint8, device="cuda")
    except RuntimeError:  # PyTorch's OutOfMemoryError, or CUDA's own
        return False
    finally:
        torch.cuda.empty_cache()
    return True
