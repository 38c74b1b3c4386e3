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

from collections.abc import Sequence

from .issue_order import in_issue_order
from .monta import ChunkBytes
from .schedule import Kind, Lane, Op, Schedule

SCHEDULES = ("S1", "S2")
AAS = "AAS"  # S2, its AllGather after the whole all-to-all: what SAA is measured against
JOINT = "ep x expert-tp"
EXPERT_TP = "expert-tp"
TP = "tp"


def dispatch(chunks: Sequence[ChunkBytes], etp_size: int) -> Schedule:
    """Rows to their experts. Buffers of chunk j: rows.j -> gathered.j -> sorted.j."""
    ops: list[Op] = []
    for j, size in enumerate(chunks):
        sent = size.exchanged * etp_size
        ops.append(Op(Kind.ALL_TO_ALL, Lane.INTER, j, sent, (), (f"rows.{j}",), (f"gathered.{j}",), JOINT))
        waits_for = (len(ops) - 1,)
        ops.append(Op(Kind.COPY, Lane.COPY, j, size.gathered, waits_for, (f"gathered.{j}",), (f"sorted.{j}",)))
    return Schedule(_name("dispatch", chunks), in_issue_order(ops), tuple(f"rows.{j}" for j in range(len(chunks))))


def combine(chunks: Sequence[ChunkBytes], etp_size: int) -> Schedule:
    """Rows back to their source. Buffers of chunk j: sorted.j -> unsorted.j -> parts.j -> rows.j."""
    ops: list[Op] = []
    for j, size in enumerate(chunks):
        ops.append(Op(Kind.COPY, Lane.COPY, j, size.gathered, (), (f"sorted.{j}",), (f"unsorted.{j}",)))
        waits_for, received = (len(ops) - 1,), size.exchanged * etp_size
        ops.append(Op(Kind.ALL_TO_ALL, Lane.INTER, j, received, waits_for, (f"unsorted.{j}",), (f"parts.{j}",), JOINT))
        ops.append(Op(Kind.SUM, Lane.INTER, j, received, (len(ops) - 1,), (f"parts.{j}",), (f"rows.{j}",)))
    return Schedule(_name("combine", chunks), in_issue_order(ops), tuple(f"sorted.{j}" for j in range(len(chunks))))


def combine_and_gather(gathered: int, phases: Sequence[ChunkBytes], etp_size: int) -> Schedule:
    """Rows back to all ranks of the TP group of their source.

    Buffers: sorted -> unsorted -> parts.p -> summed.p -> rows.p.

    Args:
        gathered: bytes of the rows of this rank's experts.
        phases: for each EP peer, this rank first, `exchanged` bytes of this rank's own rows and `gathered` bytes of
            those of all TP ranks. A single phase has all peers: one all-to-all, then the AllGather (the paper's AAS).
    """
    ops = [Op(Kind.COPY, Lane.COPY, 0, gathered, (), ("sorted",), ("unsorted",))]
    total = sum(phase.exchanged for phase in phases)
    crossing = sum(phase.exchanged for phase in phases[1:])
    for p, phase in enumerate(phases):
        own, parts, summed, rows = phase.exchanged * etp_size, (f"parts.{p}",), (f"summed.{p}",), (f"rows.{p}",)
        if p > 0 or len(phases) == 1:
            # What an all-to-all of this size, own rows included, takes on its link.
            size = own * total // crossing if crossing else own
            ops.append(Op(Kind.ALL_TO_ALL, Lane.INTER, p, size, (0,), ("unsorted",), parts, JOINT))
            ops.append(Op(Kind.SUM, Lane.INTER, p, own, (len(ops) - 1,), parts, summed))
        elif etp_size > 1:
            ops.append(Op(Kind.REDUCE_SCATTER, Lane.INTRA, p, own, (0,), ("unsorted",), parts, EXPERT_TP))
            ops.append(Op(Kind.SUM, Lane.INTRA, p, own, (len(ops) - 1,), parts, summed))
        else:
            ops.append(Op(Kind.COPY, Lane.COPY, p, own, (0,), ("unsorted",), summed))
        ops.append(Op(Kind.ALL_GATHER, Lane.INTRA, p, phase.gathered, (len(ops) - 1,), summed, rows, TP))
    return Schedule(f"parm combine and gather, {len(phases)} phase(s)", in_issue_order(ops), ("sorted",))


def _name(direction: str, chunks: Sequence[ChunkBytes]) -> str:
    return f"parm {direction}, {len(chunks)} chunk(s)"
