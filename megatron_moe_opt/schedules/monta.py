"""MoNTA's schedules: all-to-all between nodes, all-gather inside them and the reorder, chunk by chunk.

    dispatch   a2a 0 | a2a 1         | a2a 2         |                       lane inter
                     | all_gather 0  | all_gather 1  | all_gather 2          lane intra
                                     | copy 0        | copy 1 | copy 2       lane copy (O3), else lane intra

(MoNTA, Figs. 6, 7 and 9, Table 6.) Combine is the mirror: copy, reduce_scatter and its sum, a2a. The backward pass of
one runs the other on gradients. The levels differ only in chunks and lanes: O1 is one chunk; O2 copies in the lane of
the all-gather; O3 copies in a lane of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import ClassVar

from megatron_moe_opt.schedules.groups import EP, EXPERT_TP, TP
from megatron_moe_opt.schedules.pipeline import ChunkBytes, Stage, chunk_by_chunk
from megatron_moe_opt.schedules.schedule import Kind, Lane, Outline

LEVELS = ("O1", "O2", "O3")
CHUNK_COUNTS = (1, 2, 4, 8, 16)
"""The numbers of chunks to choose from."""
EXCHANGED, GATHERED, RETURNED = map(attrgetter, ("exchanged", "gathered", "returned"))
"""Functions that return one of the sizes in ChunkBytes."""


@dataclass(frozen=True)
class AllToAllAndGather:
    """The stages of rows that go over the EP group, then over the expert-TP group. A group of one rank needs no
    collective and has no stage.
    """

    ep_size: int
    etp_size: int
    sort: Lane
    """The lane in which rows are sorted by expert."""
    unsort: Lane
    """The lane in which rows are sorted by source again."""
    tp_size: int = 1
    """Number of ranks that have shared out rows all of them hold, and get back those of all (Parm's S2)."""
    chunks: int = 1
    """Number of chunks in which a partition goes, where it is one of several that go through their experts."""

    lies_in: ClassVar[Mapping[str, str]] = MappingProxyType({"arrived": "gathered"})
    """Where a buffer lies: an all-to-all may arrive in its own part of what the all-gather writes."""

    @property
    def ahead(self) -> int:
        """Returns how many parts of rows are ahead: two where rows go over both groups, see schedules/mpmoe.py."""
        return 2 if self.ep_size > 1 and self.etp_size > 1 else 1

    def out(self) -> list[Stage]:
        """Returns the stages to the experts, the last of which sorts by expert."""
        stages = [Stage(Kind.COPY, self.sort, GATHERED, "sorted")]
        if self.etp_size > 1:
            stages.insert(0, Stage(Kind.ALL_GATHER, Lane.INTRA, GATHERED, "gathered", EXPERT_TP))
        if self.ep_size > 1:
            stages.insert(0, Stage(Kind.ALL_TO_ALL, Lane.INTER, EXCHANGED, "arrived", EP))
        return stages

    def back(self) -> list[Stage]:
        """Returns the stages to the sources, the first of which sorts by source."""
        stages = [Stage(Kind.COPY, self.unsort, GATHERED, "unsorted")]
        if self.etp_size > 1:
            stages.append(Stage(Kind.REDUCE_SCATTER, Lane.INTRA, GATHERED, "parts", EXPERT_TP))
            stages.append(Stage(Kind.SUM, Lane.INTRA, GATHERED, "summed", also_reads=("unsorted",)))
        if self.ep_size > 1:
            stages.append(Stage(Kind.ALL_TO_ALL, Lane.INTER, EXCHANGED, "rows", EP))
        return stages if self.tp_size == 1 else gathered_over_tp(stages)


def gathered_over_tp(stages: Sequence[Stage]) -> list[Stage]:
    """Returns stages back to the sources behind which the ranks of a TP group gather each other's rows: what the last
    stage wrote is this rank's `own` then.
    """
    *before, last = stages
    return [*before, replace(last, writes="own"), Stage(Kind.ALL_GATHER, Lane.INTRA, RETURNED, "rows", TP)]


@cache
def outline(direction: str, level: str, num_chunks: int, ep_size: int, etp_size: int) -> Outline:
    """Returns the schedule of rows to their experts ("dispatch") or back to their source ("combine"), whatever moves.

    Buffers of chunk j: rows.j -> arrived.j -> gathered.j -> sorted.j, and sorted.j -> unsorted.j -> parts.j ->
    summed.j -> rows.j.
    """
    copies = Lane.COPY if level == "O3" else Lane.INTRA
    way = AllToAllAndGather(ep_size, etp_size, copies, copies)
    source, stages = ("rows", way.out()) if direction == "dispatch" else ("sorted", way.back())
    return chunk_by_chunk(f"monta {level} {direction}, {num_chunks} chunk(s)", source, stages, num_chunks)


def even_chunks(exchanged: int, etp_size: int, num_chunks: int) -> list[ChunkBytes]:
    """Returns chunks of equal size (up to a whole byte) where every expert-TP peer holds as much as this rank."""
    size = -(-exchanged // num_chunks)
    return [ChunkBytes(size, size * etp_size)] * num_chunks
