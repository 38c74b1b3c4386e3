"""MoNTA's schedules: all-to-all between nodes, all-gather inside them and the reorder, chunk by chunk.

    dispatch   a2a 0 | a2a 1         | a2a 2         |                       lane inter
                     | all_gather 0  | all_gather 1  | all_gather 2          lane intra
                                     | copy 0        | copy 1 | copy 2       lane copy (O3), else lane intra

(MoNTA, Figs. 6, 7 and 9, Table 6.) Combine is the mirror: copy, reduce_scatter, a2a. The backward pass of one runs the
other on gradients. The levels differ only in chunks and lanes: O1 is one chunk; O2 copies in the lane of the
all-gather; O3 copies in a lane of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import Kind, Lane, Op, Schedule

LEVELS = ("O1", "O2", "O3")


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of one chunk on this rank."""

    exchanged: int = 0
    """Of this rank's own rows: what its all-to-all carries."""
    gathered: int = 0
    """Of the rows of all expert-TP peers, after the all-gather."""


def dispatch(level: str, chunks: Sequence[ChunkBytes], ep_size: int, etp_size: int) -> Schedule:
    """Rows to their experts. Buffers of chunk j: rows.j -> arrived.j -> gathered.j -> sorted.j.

    Groups of one rank need no collective, and their ops are left out.
    """
    ops: list[Op] = []
    for j, size in enumerate(chunks):
        stages = _Stages(ops, j, f"rows.{j}")
        if ep_size > 1:
            stages.add(Kind.ALL_TO_ALL, Lane.INTER, size.exchanged, f"arrived.{j}", group="ep")
        if etp_size > 1:
            stages.add(Kind.ALL_GATHER, Lane.INTRA, size.gathered, f"gathered.{j}", group="expert-tp")
        stages.add(Kind.COPY, _copy_lane(level), size.gathered, f"sorted.{j}")
    return Schedule(_name("dispatch", level, chunks), tuple(ops), tuple(f"rows.{j}" for j in range(len(chunks))))


def combine(level: str, chunks: Sequence[ChunkBytes], ep_size: int, etp_size: int) -> Schedule:
    """Rows back to their source. Buffers of chunk j: sorted.j -> unsorted.j -> summed.j -> rows.j."""
    ops: list[Op] = []
    for j, size in enumerate(chunks):
        stages = _Stages(ops, j, f"sorted.{j}")
        stages.add(Kind.COPY, _copy_lane(level), size.gathered, f"unsorted.{j}")
        if etp_size > 1:
            stages.add(Kind.REDUCE_SCATTER, Lane.INTRA, size.gathered, f"summed.{j}", group="expert-tp")
        if ep_size > 1:
            stages.add(Kind.ALL_TO_ALL, Lane.INTER, size.exchanged, f"rows.{j}", group="ep")
    return Schedule(_name("combine", level, chunks), tuple(ops), tuple(f"sorted.{j}" for j in range(len(chunks))))


def even_chunks(exchanged: int, etp_size: int, num_chunks: int) -> tuple[ChunkBytes, ...]:
    """Chunks of equal size (to a byte) where every expert-TP peer holds as much as this rank."""
    bounds = [exchanged * j // num_chunks for j in range(num_chunks + 1)]
    sizes = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
    return tuple(ChunkBytes(size, size * etp_size) for size in sizes)


class _Stages:
    """Appends the ops of one chunk, each behind the one before."""

    def __init__(self, ops: list[Op], chunk: int, source: str) -> None:
        self.ops, self.chunk, self.source = ops, chunk, source
        self.previous: tuple[int, ...] = ()

    def add(self, kind: Kind, lane: Lane, size: int, target: str, group: str | None = None) -> None:
        self.ops.append(Op(kind, lane, self.chunk, size, self.previous, (self.source,), (target,), group))
        self.previous, self.source = (len(self.ops) - 1,), target


def _copy_lane(level: str) -> Lane:
    return Lane.COPY if level == "O3" else Lane.INTRA


def _name(direction: str, level: str, chunks: Sequence[ChunkBytes]) -> str:
    return f"monta {level} {direction}, {len(chunks)} chunk(s)"
