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
    stages = [_Stage(Kind.COPY, _copy_lane(level), "gathered", "sorted")]
    if etp_size > 1:
        stages.insert(0, _Stage(Kind.ALL_GATHER, Lane.INTRA, "gathered", "gathered", "expert-tp"))
    if ep_size > 1:
        stages.insert(0, _Stage(Kind.ALL_TO_ALL, Lane.INTER, "exchanged", "arrived", "ep"))
    return _pipeline(_name("dispatch", level, chunks), stages, chunks, "rows")


def combine(level: str, chunks: Sequence[ChunkBytes], ep_size: int, etp_size: int) -> Schedule:
    """Rows back to their source. Buffers of chunk j: sorted.j -> unsorted.j -> summed.j -> rows.j."""
    stages = [_Stage(Kind.COPY, _copy_lane(level), "gathered", "unsorted")]
    if etp_size > 1:
        stages.append(_Stage(Kind.REDUCE_SCATTER, Lane.INTRA, "gathered", "summed", "expert-tp"))
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


def _pipeline(name: str, stages: Sequence[_Stage], chunks: Sequence[ChunkBytes], source: str) -> Schedule:
    """The ops in waves: a chunk's next lane goes with the next chunk's lane before it.

    All orders that keep that of a lane's ops are the same pipeline. This one also overlaps where a GPU has a single
    hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), in which an op that waits stands in front of all issued after it.
    """
    lane_changes = [sum(a.lane is not b.lane for a, b in zip(stages[:i], stages[1:], strict=False))
                    for i in range(len(stages))]  # fmt: skip
    waves = sorted((chunk + lane_changes[i], i, chunk) for i in range(len(stages)) for chunk in range(len(chunks)))
    place = {(i, chunk): index for index, (_, i, chunk) in enumerate(waves)}
    ops = []
    for _, i, chunk in waves:
        stage, before = stages[i], stages[i - 1].target if i else source
        ops.append(
            Op(
                stage.kind,
                stage.lane,
                chunk,
                getattr(chunks[chunk], stage.size),
                (place[i - 1, chunk],) if i else (),
                (f"{before}.{chunk}",),
                (f"{stage.target}.{chunk}",),
                stage.group,
            )
        )
    return Schedule(name, tuple(ops), tuple(f"{source}.{chunk}" for chunk in range(len(chunks))))


def _copy_lane(level: str) -> Lane:
    return Lane.COPY if level == "O3" else Lane.INTRA


def _name(direction: str, level: str, chunks: Sequence[ChunkBytes]) -> str:
    return f"monta {level} {direction}, {len(chunks)} chunk(s)"
