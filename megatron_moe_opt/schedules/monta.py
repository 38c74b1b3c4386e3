"""MoNTA's schedules: all-to-all between nodes, all-gather inside them and the reorder, chunk by chunk.

    dispatch   a2a 0 | a2a 1         | a2a 2         |                       lane inter
                     | all_gather 0  | all_gather 1  | all_gather 2          lane intra
                                     | copy 0        | copy 1 | copy 2       lane copy (O3), else lane intra

(MoNTA, Figs. 6, 7 and 9, Table 6.) Combine is the mirror: copy, reduce_scatter and its sum, a2a. The backward pass of
one runs the other on gradients. The levels differ only in chunks and lanes: O1 is one chunk; O2 copies in the lane of
the all-gather; O3 copies in a lane of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .issue_order import in_issue_order
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
    stages = [_Stage(Kind.COPY, _copy_lane(level), "gathered", "sorted")]
    if etp_size > 1:
        stages.insert(0, _Stage(Kind.ALL_GATHER, Lane.INTRA, "gathered", "gathered", "expert-tp"))
    if ep_size > 1:
        stages.insert(0, _Stage(Kind.ALL_TO_ALL, Lane.INTER, "exchanged", "arrived", "ep"))
    return _pipeline(_name("dispatch", level, chunks), stages, chunks, "rows")


def combine(level: str, chunks: Sequence[ChunkBytes], ep_size: int, etp_size: int) -> Schedule:
    """Rows back to their source. Buffers of chunk j: sorted.j -> unsorted.j -> parts.j -> summed.j -> rows.j."""
    stages = [_Stage(Kind.COPY, _copy_lane(level), "gathered", "unsorted")]
    if etp_size > 1:
        stages.append(_Stage(Kind.REDUCE_SCATTER, Lane.INTRA, "gathered", "parts", "expert-tp"))
        stages.append(_Stage(Kind.SUM, Lane.INTRA, "gathered", "summed", also_reads="unsorted"))
    if ep_size > 1:
        stages.append(_Stage(Kind.ALL_TO_ALL, Lane.INTER, "exchanged", "rows", "ep"))
    return _pipeline(_name("combine", level, chunks), stages, chunks, "sorted")


def even_chunks(exchanged: int, etp_size: int, num_chunks: int) -> list[ChunkBytes]:
    """Chunks of equal size (up to a whole byte) where every expert-TP peer holds as much as this rank."""
    size = -(-exchanged // num_chunks)
    return [ChunkBytes(size, size * etp_size)] * num_chunks


@dataclass(frozen=True)
class _Stage:
    """What every chunk goes through, one stage after the other."""

    kind: Kind
    lane: Lane
    size: str
    """Field of ChunkBytes."""
    target: str
    group: str | None = None
    also_reads: str | None = None
    """Besides what the stage before it wrote."""


def _pipeline(name: str, stages: Sequence[_Stage], chunks: Sequence[ChunkBytes], source: str) -> Schedule:
    """Every chunk through all stages, lanes chunk by chunk."""
    ops: list[Op] = []
    for chunk, sizes in enumerate(chunks):
        before = source
        for stage in stages:
            reads = [name for name in (before, stage.also_reads) if name is not None]
            ops.append(
                Op(
                    stage.kind,
                    stage.lane,
                    chunk,
                    getattr(sizes, stage.size),
                    () if stage is stages[0] else (len(ops) - 1,),
                    tuple(f"{name}.{chunk}" for name in reads),
                    (f"{stage.target}.{chunk}",),
                    stage.group,
                )
            )
            before = stage.target
    return Schedule(name, in_issue_order(ops), tuple(f"{source}.{chunk}" for chunk in range(len(chunks))))


def _copy_lane(level: str) -> Lane:
    return Lane.COPY if level == "O3" else Lane.INTRA


def _name(direction: str, level: str, chunks: Sequence[ChunkBytes]) -> str:
    return f"monta {level} {direction}, {len(chunks)} chunk(s)"
