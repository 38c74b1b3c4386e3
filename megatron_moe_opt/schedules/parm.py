"""Parm's schedule: one all-to-all over expert and expert-tensor parallelism together (Parm, Fig. 4c and d).

    dispatch   EP&ESP-AlltoAll -> copy         every row to all shards of its expert at once
    combine    copy -> EP&ESP-AlltoAll         every row back from all shards; their sum ends the op

Where MoNTA sends a row once between nodes and shares it inside, this sends it expert-TP times: it saves a collective,
and pays with bytes on the slow link.
"""

from __future__ import annotations

from collections.abc import Sequence

from .monta import ChunkBytes
from .schedule import Kind, Lane, Op, Schedule

JOINT = "ep x expert-tp"


def dispatch(chunks: Sequence[ChunkBytes], etp_size: int) -> Schedule:
    """Rows to their experts. Buffers of chunk j: rows.j -> gathered.j -> sorted.j."""
    ops: list[Op] = []
    for j, size in enumerate(chunks):
        sent = size.exchanged * etp_size
        ops.append(Op(Kind.ALL_TO_ALL, Lane.INTER, j, sent, (), (f"rows.{j}",), (f"gathered.{j}",), JOINT))
        waits_for = (len(ops) - 1,)
        ops.append(Op(Kind.COPY, Lane.COPY, j, size.gathered, waits_for, (f"gathered.{j}",), (f"sorted.{j}",)))
    return Schedule(_name("dispatch", chunks), tuple(ops), tuple(f"rows.{j}" for j in range(len(chunks))))


def combine(chunks: Sequence[ChunkBytes], etp_size: int) -> Schedule:
    """Rows back to their source. Buffers of chunk j: sorted.j -> unsorted.j -> rows.j."""
    ops: list[Op] = []
    for j, size in enumerate(chunks):
        ops.append(Op(Kind.COPY, Lane.COPY, j, size.gathered, (), (f"sorted.{j}",), (f"unsorted.{j}",)))
        waits_for, received = (len(ops) - 1,), size.exchanged * etp_size
        ops.append(Op(Kind.ALL_TO_ALL, Lane.INTER, j, received, waits_for, (f"unsorted.{j}",), (f"rows.{j}",), JOINT))
    return Schedule(_name("combine", chunks), tuple(ops), tuple(f"sorted.{j}" for j in range(len(chunks))))


def _name(direction: str, chunks: Sequence[ChunkBytes]) -> str:
    return f"parm {direction}, {len(chunks)} chunk(s)"
