"""The builder of outlines: ops in the order in which they are added, each waiting for what its buffers ask for.

An op waits for whoever wrote what it reads, and for whoever reads or wrote what it overwrites. Buffers are names:
NAME.SLOT holds rows of one chunk at a time, NAME those of all chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

from megatron_moe_opt.schedules.issue_order import in_issue_order
from megatron_moe_opt.schedules.schedule import Kind, Lane, Measure, Op, Outline, Schedule, ScheduleError


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of one chunk on this rank."""

    exchanged: int = 0
    """Bytes of this rank's own rows, which its all-to-all carries."""
    gathered: int = 0
    """Bytes of the rows of all expert-TP peers, after the all-gather."""
    returned: int = 0
    """Bytes of the rows that this rank gets back, where a TP group has shared its rows out."""


@dataclass(frozen=True)
class Stage:
    """An op that a chunk goes through, with what the stage before it wrote."""

    kind: Kind
    lane: Lane
    size: Measure
    writes: str
    group: str | None = None
    also_reads: tuple[str, ...] = ()


class Stages(Protocol):
    """What rows go through between their source and their experts."""

    @property
    def lies_in(self) -> Mapping[str, str]:
        """Returns the buffers that may be in the memory of another one, by name."""

    @property
    def ahead(self) -> int:
        """Returns how many parts of rows are on their way before the experts have had one, if both are one pipeline."""

    @property
    def chunks(self) -> int:
        """Returns in how many chunks such a part goes, one behind another, if both are one pipeline."""

    def out(self) -> list[Stage]:
        """Returns the stages to the experts, the last of which sorts by expert and writes `sorted`."""

    def back(self) -> list[Stage]:
        """Returns the stages to the sources, the first of which sorts by source."""


def even_parts(whole: int, count: int) -> list[int]:
    """Returns how much of a whole each of so many chunks has, as evenly as whole numbers go."""
    return [end - begin for begin, end in pairwise(whole * chunk // count for chunk in range(count + 1))]


def own_buffer(name: str, chunk: int) -> str:
    """Returns the name of a buffer that each chunk has for itself."""
    return f"{name}.{chunk}"


@cache
def base_name(buffer: str) -> str:
    """Returns the NAME of a buffer NAME.SLOT, or NAME."""
    return buffer.partition(".")[0]


class Pipeline:
    """Builds one outline op by op, and derives from the buffers that ops touch what each has to wait for."""

    def __init__(self, inputs: Iterable[str], buffer: Callable[[str, int], str] = own_buffer) -> None:
        """
        Args:
            inputs: buffers that are written before; the number of NAME.CHUNK is that of its chunk.
            buffer: which one an op of a chunk touches, given the name that `add` and `through` get.
        """
        self._inputs, self._buffer = tuple(inputs), buffer
        self._ops: list[Op] = []
        self._measures: list[Measure] = []
        self._chunk = {name: int(slot) for name in self._inputs for _, dot, slot in [name.rpartition(".")] if dot}
        """The chunk whose rows are in a buffer, by the name of the buffer."""
        self._writer: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}

    def add(
        self,
        kind: Kind,
        lane: Lane,
        chunk: int,
        size: Measure,
        reads: Sequence[str],
        writes: Sequence[str],
        group: str | None = None,
        part: int = 0,
    ) -> None:
        """Appends an op, which waits for whatever its buffers ask for.

        Raises:
            ScheduleError: it would read the rows of another chunk.
        """
        index, buffer, writer = len(self._ops), self._buffer, self._writer
        reads = tuple([buffer(name, chunk) for name in reads])
        writes = tuple([buffer(name, chunk) for name in writes])
        before: set[int] = set()
        for name in reads:
            if "." in name and self._chunk.get(name) != chunk:
                raise ScheduleError(f"{kind.value} of chunk {chunk} reads {name} of chunk {self._chunk.get(name)}")
            if name in writer:
                before.add(writer[name])
        for name in writes:
            if name in writer:
                before.add(writer[name])
            before.update(self._readers.get(name, ()))
        last = {self._ops[other].lane: other for other in sorted(before)}  # a lane's earlier ops have ended by then
        for name in reads:
            self._readers.setdefault(name, []).append(index)
        for name in writes:
            writer[name], self._readers[name], self._chunk[name] = index, [], chunk
        self._ops.append(Op(kind, lane, chunk, 0, tuple(sorted(last.values())), reads, writes, group, part=part))
        self._measures.append(size)

    def through(
        self,
        chunk: int,
        source: str,
        stages: Sequence[Stage],
        names: Mapping[str, str] = MappingProxyType({}),
        part: int = 0,
    ) -> str:
        """Appends stages, the first of which reads `source`, and returns the name of what the last one writes.

        Args:
            names: of the stages' buffers, where they are to be called otherwise.
            part: of the chunk, that the ops move.
        """
        for stage in stages:
            reads = (source, *(names.get(name, name) for name in stage.also_reads))
            source = names.get(stage.writes, stage.writes)
            self.add(stage.kind, stage.lane, chunk, stage.size, reads, (source,), stage.group, part)
        return source

    def outline(self, name: str) -> Outline:
        """Returns what was added, in the order in which to issue it."""
        order, ops = in_issue_order(self._ops)
        return Outline(Schedule(name, ops, self._inputs), tuple(self._measures[index] for index in order))


def chunk_by_chunk(name: str, source: str, stages: Sequence[Stage], num_chunks: int, ahead: int = 0) -> Outline:
    """Returns an outline of every chunk through these stages, with buffers of its own, from `source` on.

    Args:
        ahead: the stages that all chunks go through before any goes on.
    """
    pipeline = Pipeline(own_buffer(source, chunk) for chunk in range(num_chunks))
    sources = [pipeline.through(chunk, source, stages[:ahead]) for chunk in range(num_chunks)]
    for chunk in range(num_chunks):
        pipeline.through(chunk, sources[chunk], stages[ahead:])
    return pipeline.outline(name)


def one_by_one(name: str, source: str, stages: Sequence[Stage]) -> Outline:
    """Returns an outline of all rows through these stages, from `source` on."""
    pipeline = Pipeline((source,), lambda buffer, _: buffer)
    pipeline.through(0, source, stages)
    return pipeline.outline(name)
