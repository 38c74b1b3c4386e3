"""Who uses which bytes, and whether they wait for each other: races, and memory that is given to others too early."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tests.accelerator.clocks import Actor, Streams, merge


class Region(NamedTuple):
    """Bytes of a storage: [first, end), of which a row of `pitch` bytes holds [left, right)."""

    first: int
    end: int
    pitch: int = 1
    left: int = 0
    right: int = 1

    def overlaps(self, other: Region) -> bool:
        if self.end <= other.first or other.end <= self.first:
            return False
        columns = self.pitch == other.pitch and self.pitch > 1
        return not columns or (self.left < other.right and other.left < self.right)

    def covers(self, other: Region) -> bool:
        return self.pitch == 1 and self.first <= other.first and other.end <= self.end


def region_of(tensor: torch.Tensor) -> Region:
    """Returns the region that a strided tensor lies in. Columns of rows are told apart."""
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return Region(first, first + size * tensor.numel())
    end = first + size * (1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    if tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) > tensor.size(1):
        pitch = tensor.stride(0) * size
        left = first % pitch
        if left + tensor.size(1) * size <= pitch:
            return Region(first, end, pitch, left, left + tensor.size(1) * size)
    return Region(first, end)


class Access(NamedTuple):
    region: Region
    actor: Actor
    time: int
    writes: bool
    what: str


@dataclass(eq=False, slots=True)
class Block:
    """The memory of a storage."""

    owner: Actor
    """The actor from whose memory it is taken, and to whom it is given back."""
    on_host: bool
    pinned: bool = False
    named: bool = False
    """Whether it was made for `device=tensor.device` and not used yet: then it is not known on
    whose side that tensor was.
    """
    accesses: list[Access] = field(default_factory=list)
    recorded: set[Actor] = field(default_factory=set)


class Memory:
    """All storages that were seen. `mistakes` are sentences."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.mistakes = streams, list[str]()
        self._blocks: dict[int, Block] = {}
        self._watched: dict[int, weakref.ref] = {}
        self._given_back: dict[int, list[Access]] = {}
        """Uses of memory that has been given back, and is given anew to its owner's next work, by owner that follows
        its callers. Megatron's streams do, and lanes of a schedule.
        """

    def block(self, tensor: torch.Tensor, new_on: Actor | None = None, on_host: bool = False) -> Block:
        """Returns the block of a tensor. One that is first seen is the device's from before, or
        new, and taken by `new_on`.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is not None:
            return block
        block = self._blocks[key] = Block(new_on or self.streams.default, on_host)
        self._watched[key] = weakref.ref(storage, lambda _: self._free(key))
        if new_on is not None and not on_host:
            # Its memory may have been another's, whose work is still queued there.
            self._check_ended(new_on, self._given_back.pop(new_on.number, ()))
            whole = Region(0, max(1, storage.nbytes()))
            block.accesses.append(Access(whole, new_on, new_on.clock[new_on.number], True, "its allocation"))
        return block

    def knows(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._blocks

    def use(self, tensor: torch.Tensor, actor: Actor, time: int, writes: bool, what: str) -> None:
        """A use of all of a tensor."""
        self.use_region(self.block(tensor), region_of(tensor), actor, time, writes, what)

    def use_region(self, block: Block, region: Region, actor: Actor, time: int, writes: bool, what: str) -> None:
        if region.first == region.end:
            return
        kept = []
        for other in block.accesses:
            ordered = self.streams.happened(actor, other.actor.number, other.time)
            if not ordered and (writes or other.writes) and region.overlaps(other.region):
                verbs = [("writes", "wrote"), ("reads", "read")]
                now, before = verbs[not writes][0], verbs[not other.writes][1]
                self.mistakes.append(
                    f"{what} on {actor} {now} what {other.what} on {other.actor} {before}, without a wait between them"
                )
            # Who is not ordered behind what is dropped here is not ordered behind this access either.
            if not (ordered and region.covers(other.region) and (writes or not other.writes)):
                kept.append(other)
        kept.append(Access(region, actor, time, writes, what))
        block.accesses = kept

    def record(self, tensor: torch.Tensor, actor: Actor) -> None:
        """tensor.record_stream: its memory goes back only when what the stream has queued by then is done."""
        self.block(tensor).recorded.add(actor)

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Frees memory by hand while tensors still hold the storage."""
        if storage._cdata in self._blocks:
            self._free(storage._cdata)

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key)
        del self._watched[key]
        if block.on_host:
            return  # pinned memory waits for the copies that read it
        latest = {one.actor: one for one in block.accesses if one.actor.number != 0}
        for behind in block.recorded:  # of what a collective does, when the stream has waited for it
            uses = latest.items()
            latest = {one: use for one, use in uses if not self.streams.happened(behind, one.number, use.time)}
        if block.owner.follows:
            self._given_back.setdefault(block.owner.number, []).extend(latest.values())
        else:
            self._check_ended(block.owner, latest.values())

    def _check_ended(self, owner: Actor, uses: Iterable[Access]) -> None:
        """Notes a mistake where memory of the owner is used by work that has not ended when it is given back."""
        merge(owner.clock, self.streams.host.clock)
        for use in uses:
            if not self.streams.happened(owner, use.actor.number, use.time):
                self.mistakes.append(f"memory of {owner} is given back while {use.what} on {use.actor} still uses it")

    def forget(self) -> None:
        """Ends the watch."""
        self._blocks.clear()
        self._given_back.clear()
        self._watched.clear()


def tensors_in(values: object) -> list[torch.Tensor]:
    """Returns the tensors in arguments of whatever nesting. Called several times an operation, for which
    PyTorch's tree_leaves is slow.
    """
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += tensors_in(value)
    return found
