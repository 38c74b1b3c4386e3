"""Parm's schedules: one all-to-all over expert and expert-tensor parallelism together (Parm, Fig. 4c and d).

    dispatch            EP&ESP-AlltoAll -> copy      every row to all shards of its expert at once
    combine             copy -> EP&ESP-AlltoAll -> sum   every row back from all shards, and their sum
    combine_and_gather  copy -> a2a 1            | a2a 2         | a2a 3                          lane inter
                                reduce_scatter 0 | all_gather 0  | all_gather 1  | all_gather 2   lane intra

Where MoNTA sends a row once between nodes and shares it inside, this sends it expert-TP times: it saves a collective,
and pays with bytes on the slow link. `combine_and_gather` is for rows that the ranks of a TP group have shared out
among them (S2) and that all of them get back: the paper's SAA (section III-D, Fig. 5). Its chunks are phases: in each
one the rows of one EP peer come back, from all of its shards, and are shared over TP while the next peer's come. The
first peer is the rank's own, whose shards are its expert-TP group: their rows stay off the slow link, and come while
the others' are on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import ClassVar

from megatron_moe_opt.schedules.groups import EXPERT_TP, JOINT_GROUP, TP
from megatron_moe_opt.schedules.monta import GATHERED
from megatron_moe_opt.schedules.pipeline import ChunkBytes, Pipeline, Stage, chunk_by_chunk, own_buffer
from megatron_moe_opt.schedules.schedule import Kind, Lane, Outline, Schedule

SCHEDULES = ("S1", "S2")
AAS = "AAS"  # S2, its AllGather after the whole all-to-all: what SAA is measured against


@dataclass(frozen=True)
class JointAllToAll:
    """One all-to-all over expert and expert-tensor parallelism together."""

    etp_size: int
    unsort: Lane = Lane.COPY
    """The lane in which rows are sorted by source again."""
    sums: Lane = Lane.INTER
    """The lane in which what the shards have made is summed."""

    lies_in: ClassVar[Mapping[str, str]] = MappingProxyType({})
    ahead: ClassVar[int] = 1
    """The parts of rows that are on their way before the experts have had one (pipeline.Stages)."""
    chunks: ClassVar[int] = 1

    def out(self) -> list[Stage]:
        """Returns the stages to all shards of the experts; the last one sorts by expert."""
        return [
            Stage(Kind.ALL_TO_ALL, Lane.INTER, self._of_all_shards, "gathered", JOINT_GROUP),
            Stage(Kind.COPY, Lane.COPY, GATHERED, "sorted"),
        ]

    def back(self) -> list[Stage]:
        """Returns the stages back to the sources, with the sum of the shards' parts; the first one sorts by source."""
        return [
            Stage(Kind.COPY, self.unsort, GATHERED, "unsorted"),
            Stage(Kind.ALL_TO_ALL, Lane.INTER, self._of_all_shards, "parts", JOINT_GROUP),
            Stage(Kind.SUM, self.sums, self._of_all_shards, "rows"),
        ]

    def _of_all_shards(self, size: ChunkBytes) -> int:
        return size.exchanged * self.etp_size


@cache
def outline(direction: str, num_chunks: int, etp_size: int) -> Outline:
    """Returns the schedule of rows to their experts ("dispatch") or back to their source ("combine"), whatever moves.

    Buffers of chunk j: rows.j -> gathered.j -> sorted.j, and sorted.j -> unsorted.j -> parts.j -> rows.j.
    """
    way = JointAllToAll(etp_size)
    source, stages = ("rows", way.out()) if direction == "dispatch" else ("sorted", way.back())
    return chunk_by_chunk(f"parm {direction}, {num_chunks} chunk(s)", source, stages, num_chunks)


def combine_and_gather(gathered: int, phases: Sequence[ChunkBytes], etp_size: int) -> Schedule:
    """Returns the schedule that sends rows back to all ranks of the TP group of their source.

    Buffers: sorted -> unsorted -> parts.p -> summed.p -> rows.p.

    Args:
        gathered, phases: see `sizes_of_phases`. A single phase has all peers: one all-to-all, then the AllGather (the
            paper's AAS).
    """
    return outline_and_gather(len(phases), etp_size).sized(sizes_of_phases(gathered, phases, etp_size))


@dataclass(frozen=True)
class PhaseBytes:
    """Bytes that move in one phase on this rank."""

    experts: int
    """Bytes of the rows of this rank's experts, of all phases."""
    on_link: int
    """The size at which to read this phase off the all-to-all's curve, whose sizes count rows that stay on the rank
    too.
    """
    own: int
    """Bytes of this rank's own rows, from all shards."""
    gathered: int
    """Bytes of the rows of all TP ranks."""


def sizes_of_phases(experts: int, phases: Sequence[ChunkBytes], etp_size: int) -> list[PhaseBytes]:
    """Returns what moves in `combine_and_gather`.

    Args:
        experts: bytes of the rows of this rank's experts.
        phases: for each EP peer, this rank first, `exchanged` bytes of this rank's own rows and `gathered` bytes of
            those of all TP ranks.
    """
    total = sum(phase.exchanged for phase in phases)
    crossing = sum(phase.exchanged for phase in phases[1:])
    sizes = []
    for phase in phases:
        own = phase.exchanged * etp_size
        sizes.append(PhaseBytes(experts, own * total // crossing if crossing else own, own, phase.gathered))
    return sizes


@cache
def outline_and_gather(num_phases: int, etp_size: int) -> Outline:
    """Returns what `combine_and_gather` does, whatever moves."""
    experts, on_link, own = attrgetter("experts"), attrgetter("on_link"), attrgetter("own")
    whole = ("sorted", "unsorted")  # of all phases
    pipeline = Pipeline(("sorted",), lambda name, phase: name if name in whole else own_buffer(name, phase))
    pipeline.through(0, "sorted", [Stage(Kind.COPY, Lane.COPY, experts, "unsorted")])
    for p in range(num_phases):
        if p > 0 or num_phases == 1:
            stages = [Stage(Kind.ALL_TO_ALL, Lane.INTER, on_link, "parts", JOINT_GROUP)]
            stages.append(Stage(Kind.SUM, Lane.INTER, own, "summed"))
        elif etp_size > 1:
            stages = [Stage(Kind.REDUCE_SCATTER, Lane.INTRA, own, "parts", EXPERT_TP)]
            stages.append(Stage(Kind.SUM, Lane.INTRA, own, "summed"))
        else:
            stages = [Stage(Kind.COPY, Lane.COPY, own, "summed")]
        stages.append(Stage(Kind.ALL_GATHER, Lane.INTRA, GATHERED, "rows", TP))
        pipeline.through(p, "unsorted", stages)
    return pipeline.outline(f"parm combine and gather, {num_phases} phase(s)")
