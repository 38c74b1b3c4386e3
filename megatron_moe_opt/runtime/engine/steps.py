"""What the ops of a schedule do: moves of rows, bound to tensors and process groups.

Each function makes the `Steps` of one op. They may be run once, by the executor. Rows are contiguous tensors of one
device; W is the width of a row. The tensors are held until the schedule has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels import ChunkList, WireFormat, empty
from megatron_moe_opt.runtime.observed.traffic import count_sent

_C = load_extension()


@dataclass(frozen=True)
class Steps:
    """What an op does: actions of the extension, one after another, and the group that they talk to."""

    actions: tuple[Any, ...] = ()
    group: ProcessGroup | None = None
    raised: tuple[list[BaseException], ...] = ()
    """The lists in which Python functions among the actions leave what they raise."""

    def __add__(self, later: Steps) -> Steps:
        return Steps(self.actions + later.actions, self.group or later.group, self.raised + later.raised)


Blocks = Sequence[tuple[int, int]]
"""The blocks of rows of a group's ranks, (first row, rows) each."""

Columns = Sequence[tuple[int, int, torch.dtype | WireFormat]]
"""The parts of a row: (first byte, elements, their dtype), or (0, hidden elements, the format of rows on the wire)."""


def blocks_of(counts: Sequence[int], first: int = 0) -> list[tuple[int, int]]:
    """Returns blocks of `counts` rows that lie one after another from row `first` on."""
    starts = accumulate(counts, initial=first)
    return list(zip(starts, counts, strict=False))


def exchange(
    sent: torch.Tensor, to: Blocks, received: torch.Tensor, from_: Blocks, group: ProcessGroup, collective: str
) -> Steps:
    """Sends rows to[p] of `sent` to each rank p of the group, and puts what p sends at from_[p] of `received`.

    Rows stay where they are where both are the same memory. `collective` is the name under which the bytes are counted.
    """
    row_bytes = sent[:1].numel() * sent.element_size()
    count_sent(collective, group, [rows * row_bytes for _, rows in to])
    return Steps((_C.exchange(group, sent, list(to), received, list(from_)),), group)


def all_to_all(
    rows: torch.Tensor,
    send_counts: Sequence[int],
    received: torch.Tensor,
    receive_counts: Sequence[int],
    group: ProcessGroup,
) -> Steps:
    """Sends rows [sum(send_counts), W], receives [sum(receive_counts), W]: blocks in rank order on both sides."""
    return exchange(rows, blocks_of(send_counts), received, blocks_of(receive_counts), group, "all_to_all")


def all_gather(rows: torch.Tensor, gathered: torch.Tensor, counts: Sequence[int], group: ProcessGroup) -> Steps:
    """Gathers own rows [counts[rank], W] to [sum(counts), W]. `rows` may be its own block of `gathered`."""
    own = [(0, counts[group.rank()])] * group.size()
    return exchange(rows, own, gathered, blocks_of(counts), group, "all_gather")


def scatter(rows: torch.Tensor, parts: torch.Tensor, counts: Sequence[int], group: ProcessGroup) -> Steps:
    """Sends each rank its block of rows [sum(counts), W]: the exchange of a reduce-scatter, without the sum.

    Args:
        rows: the own block stays there.
        parts: what the other ranks have for this one, [(ranks - 1) * counts[rank], W].
    """
    rank, mine = group.rank(), counts[group.rank()]
    sent, received = blocks_of(counts), blocks_of([0 if peer == rank else mine for peer in range(group.size())])
    sent[rank] = received[rank] = (0, 0)
    return exchange(rows, sent, parts, received, group, "reduce_scatter")


def sum_scattered(
    rows: torch.Tensor,
    parts: torch.Tensor,
    summed: torch.Tensor,
    counts: Sequence[int],
    group: ProcessGroup,
    columns: Columns | None = None,
) -> Steps:
    """Sums what `scatter` has brought, in rank order, to summed [counts[rank], W]. It is an op of its own, so that the
    exchange is waited for when the sum has its turn.

    Args:
        columns: each part of a row that is summed; None: all of it, in the rows' dtype. Elements narrower than float32
            are added in it and rounded once.
    """
    rank, mine = group.rank(), counts[group.rank()]
    blocks = list(parts.narrow(0, 0, (group.size() - 1) * mine).view(-1, mine, rows.size(1)).unbind()) if mine else []
    blocks.insert(rank, rows.narrow(0, sum(counts[:rank]), mine))
    return sum_parts(blocks, summed, columns or [(0, rows.size(1), rows.dtype)])


def reduce_scatter(rows: torch.Tensor, summed: torch.Tensor, group: ProcessGroup) -> tuple[Steps, Steps]:
    """Returns the exchange and the sum of a reduce-scatter in equal blocks, of rows [ranks * N, W] to summed [N, W]."""
    counts = [summed.size(0)] * group.size()
    parts = empty((rows.size(0) - summed.size(0), rows.size(1)), rows.dtype, rows.device)
    return scatter(rows, parts, counts, group), sum_scattered(rows, parts, summed, counts, group)


def sum_parts(parts: Sequence[torch.Tensor], summed: torch.Tensor, columns: Columns) -> Steps:
    """Sums parts[0] + parts[1] + ..., one after the other, all [R, W], to `summed`; `columns` as in `sum_scattered`."""
    words = ((first, width, kind.value if isinstance(kind, WireFormat) else kind) for first, width, kind in columns)
    return Steps(tuple(_C.sum_parts(list(parts), summed, *column) for column in words))


def copy_rows(source: torch.Tensor, target: torch.Tensor, chunks: ChunkList) -> Steps:
    """Moves the rows of `chunks` from source [R, W] to target [N, W]."""
    return copy_columns(source, 0, target, 0, source.size(1) * source.element_size(), chunks)


def copy_columns(
    source: torch.Tensor, source_byte: int, target: torch.Tensor, target_byte: int, row_bytes: int, chunks: ChunkList
) -> Steps:
    """Moves row_bytes bytes of the rows of `chunks`, from and to these bytes of a row."""
    return Steps((_C.copy_rows(source, source_byte, target, target_byte, row_bytes, chunks.tensors),))


def convert_rows(
    source: torch.Tensor,
    source_wire: WireFormat,
    target: torch.Tensor,
    target_wire: WireFormat,
    hidden: int,
    chunks: ChunkList,
) -> Steps:
    """Does what `copy_rows` does, but with the first `hidden` elements of a row and to the format of the target's rows:
    the reorder between "by source rank" and "by local expert" that widens, or narrows. One of the two formats is SAME.
    """
    return Steps((_C.convert_chunks(source, source_wire.value, target, target_wire.value, hidden, chunks.tensors),))


def call(function: Callable[[], object]) -> Steps:
    """Calls Python, in the op's lane: the compute lane is the caller's thread, any other has a thread of its own.

    A function that runs a schedule itself, as a backward pass that recomputes may, fails: see executor.
    """
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)
            raise

    return Steps((_C.call_python(guarded),), raised=(raised,))


def run_now(steps: Steps) -> None:
    """Runs steps without collectives at once: for functions of `call`, which learn their tensors when they run."""
    for action in steps.actions:
        action.run()
