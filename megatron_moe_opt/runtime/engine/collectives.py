"""Collectives on the rows (first dimension) of a tensor, with unequal row counts, over NCCL or Gloo.

Pure torch.distributed: no autograd and no Megatron in here. `start_<op>` issues the communication and returns a
`PendingRows` whose `wait()` gives the result, `<op>` waits at once.

Order of sums. NCCL keeps its own order. On Gloo, which has no reduce-scatter with unequal counts, each rank gets its
rows from every peer and adds them in rank order 0..n-1 (half precision in float32): the result depends on nothing but
the data, so all callers of these functions agree bit for bit.

Bytes on the wire. Each rank's rows go once to each peer that needs them; nothing is padded. On Gloo a call is one
exchange of the extension (csrc/pipeline/exchange.h), all receives and sends of which are under way at once, receives
first: its own all-to-all posts sends before receives, so that between two ranks one direction follows the other, and
its all-gather goes round a ring, one rank at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_moe_opt.errors import LayerError
from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels import empty
from megatron_moe_opt.runtime.engine.steps import blocks_of
from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.runtime.observed.traffic import count_issued

_C = load_extension()


class CollectiveError(LayerError):
    """A collective failed: names the operation, its group and this rank; `__cause__` is the backend's own error."""


class Waitable(Protocol):
    """What a collective leaves behind when it is issued asynchronously."""

    def wait(self) -> object:
        """Waits until the operation is complete."""


@contextmanager
def named_errors(op: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn a backend's error inside the block into a CollectiveError that says what failed where.

    The outermost name wins: an all-gather built on an all-to-all fails as the all-gather.
    """
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__ or error if isinstance(error, CollectiveError) else error
        what = describe_failure(op, group, _reason(cause))
        raise CollectiveError(failure_board.explain(what, is_own=False)) from cause


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def describe_failure(op: str, group: dist.ProcessGroup | None, reason: str) -> str:
    """Returns one sentence: what failed, on which group and rank, and the first line of the reason."""
    return f"{op} on {_group_name(group)} failed on rank {_rank()}: {first_line(reason)}"


_GLOO_PLACE = re.compile(r"^\[\S+/gloo/\S+:\d+\] ")


def first_line(reason: str) -> str:
    """Returns of a reason what fits into one sentence: without the place in Gloo's source, and its advice."""
    line = (reason.strip() or "for no reason given").splitlines()[0]
    return _GLOO_PLACE.sub("", line).partition(". This is typically caused by")[0]


def global_rank(group: dist.ProcessGroup, rank: int) -> int | str:
    """Returns the global rank of a rank of `group`, as far as it can still be told."""
    try:
        return dist.get_global_rank(group, rank)
    except (KeyError, ValueError, RuntimeError):
        return f"{rank} of the group"


def _rank() -> str:
    return str(dist.get_rank()) if dist.is_initialized() else "unknown (no process group)"


def _group_name(group: dist.ProcessGroup | None) -> str:
    if not dist.is_initialized():
        return "a group that is not initialized"
    group = group or dist.group.WORLD
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return "a group that is already destroyed"
    name = getattr(group, "group_desc", None) or getattr(group, "group_name", "")
    return f"group {name} (ranks {', '.join(map(str, ranks))})"


@dataclass
class PendingRows:
    """A collective under way. `wait()` may be called again: later calls return the same tensor."""

    op: str
    group: dist.ProcessGroup | None
    work: Waitable | None
    finish: Callable[[], torch.Tensor]
    _result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Block until complete and return the result. Raises CollectiveError where the backend failed."""
        if self._result is None:
            if self.work is not None:
                with named_errors(self.op, self.group):
                    self.work.wait()
            self._result = self.finish()
            self.work = None
        return self._result


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns the device of the tensors of a group's collectives: the current CUDA device with NCCL, else the CPU."""
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")


def _on_gloo(group: dist.ProcessGroup | None) -> bool:
    return dist.get_backend(group) == "gloo"


failure_board.interrupted_by(_C.give_up_waits)


def start_exchange_on_gloo(
    collective: str,
    sent: torch.Tensor,
    send: Sequence[tuple[int, int]],
    received: torch.Tensor,
    receive_counts: Sequence[int],
    group: dist.ProcessGroup | None,
) -> Waitable:
    """Starts to move rows send[p] (first, number) of `sent` to each rank p of the group, and receive_counts[p] rows
    from it into `received`, in rank order. Returns what waits for them.

    Args:
        collective: what a TrafficCounter counts it as.
    """
    group = group or dist.group.WORLD
    row_bytes = sent[:1].numel() * sent.element_size()
    count_issued(collective, group, [rows * row_bytes for _, rows in send])
    exchange = _C.exchange(group, sent.detach(), list(send), received, blocks_of(receive_counts))
    exchange.begin()
    return exchange


def _equal(counts: list[int] | None) -> bool:
    return counts is None or all(count == counts[0] for count in counts)


def check_counts(op: str, counts: list[int], rows: int, group: dist.ProcessGroup | None, what: str) -> None:
    """Raises ValueError where `counts` are not one for each rank of the group, that add up to `rows`."""
    if len(counts) != dist.get_world_size(group) or sum(counts) != rows:
        raise ValueError(
            f"{op}: {what} {counts} must hold one count for each of the {dist.get_world_size(group)} ranks"
            f" and sum to the {rows} rows given"
        )


def all_to_all_rows(
    rows: torch.Tensor, receive_counts: list[int], send_counts: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Sends consecutive blocks of rows to the ranks of the group, waits, and returns theirs, in rank order.

    Args:
        rows: [sum(send_counts), ...], any dtype; made contiguous if it is not.
        receive_counts: rows to come from each rank.
        send_counts: rows to go to each rank.
        group: the process group; None is the default group.

    Returns:
        [sum(receive_counts), ...], the blocks in rank order.
    """
    check_counts("all_to_all_rows", send_counts, rows.shape[0], group, "send_counts")
    rows = rows.contiguous()
    with named_errors("all_to_all_rows", group):
        received = empty((sum(receive_counts), *rows.shape[1:]), rows.dtype, rows.device)
        if _on_gloo(group):
            blocks = blocks_of(send_counts)
            work = start_exchange_on_gloo("all_to_all", rows, blocks, received, receive_counts, group)
        else:
            work = dist.all_to_all_single(received, rows, receive_counts, send_counts, group=group, async_op=True)
    return PendingRows("all_to_all_rows", group, work, lambda: received).wait()


def start_all_gather_rows(rows: torch.Tensor, counts: list[int] | None, group: dist.ProcessGroup | None) -> PendingRows:
    """Collect the rows of all ranks of the group, in rank order.

    Args:
        rows: [counts[rank], ...], any dtype; made contiguous if it is not.
        counts: rows that each rank brings; None says that all bring as many as this one.
        group: the process group; None is the default group.

    Returns:
        A PendingRows of [sum(counts), ...].
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = rows.contiguous()
    if counts is None:
        counts = [rows.shape[0]] * size
    if len(counts) != size or counts[rank] != rows.shape[0]:
        raise ValueError(f"all_gather_rows: counts {counts} do not fit rank {rank} of {size} with {rows.shape[0]} rows")
    with named_errors("all_gather_rows", group):
        gathered = empty((sum(counts), *rows.shape[1:]), rows.dtype, rows.device)
        if _on_gloo(group):
            everything = [(0, rows.shape[0])] * size
            work = start_exchange_on_gloo("all_gather", rows, everything, gathered, counts, group)
        elif _equal(counts):
            work = dist.all_gather_into_tensor(gathered, rows, group=group, async_op=True)
        else:
            work = dist.all_gather(list(gathered.split(counts)), rows, group=group, async_op=True)
    return PendingRows("all_gather_rows", group, work, lambda: gathered)


def all_gather_rows(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns the rows of all ranks, each of which brings as many, in rank order: [ranks * R, ...]."""
    return start_all_gather_rows(rows, None, group).wait()


def start_reduce_scatter_rows(
    rows: torch.Tensor, counts: list[int] | None, group: dist.ProcessGroup | None
) -> PendingRows:
    """Sum the tensors of all ranks of the group and keep this rank's block of rows.

    Args:
        rows: [sum(counts), ...], a dtype that can be added; made contiguous if it is not.
        counts: rows that each rank keeps; None says that the rows are shared out equally.
        group: the process group; None is the default group.

    Returns:
        A PendingRows of [counts[rank], ...].
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = rows.contiguous()
    if counts is None:
        if rows.shape[0] % size:
            raise ValueError(f"reduce_scatter_rows: {rows.shape[0]} rows cannot be shared equally by {size} ranks")
        counts = [rows.shape[0] // size] * size
    check_counts("reduce_scatter_rows", counts, rows.shape[0], group, "counts")
    kept = (counts[rank], *rows.shape[1:])
    with named_errors("reduce_scatter_rows", group):
        if _on_gloo(group):
            parts = empty((size * counts[rank], *rows.shape[1:]), rows.dtype, rows.device)
            blocks = blocks_of(counts)
            work = start_exchange_on_gloo("reduce_scatter", rows, blocks, parts, [counts[rank]] * size, group)
            return PendingRows("reduce_scatter_rows", group, work, lambda: sum_in_rank_order(parts.view(size, *kept)))
        total = empty(kept, rows.dtype, rows.device)
        if _equal(counts):
            work = dist.reduce_scatter_tensor(total, rows, group=group, async_op=True)
        else:
            work = dist.reduce_scatter(total, list(rows.split(counts)), group=group, async_op=True)
    return PendingRows("reduce_scatter_rows", group, work, lambda: total)


def reduce_scatter_rows(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns this rank's equal part of the sum of the tensors of all ranks: [R / ranks, ...]."""
    return start_reduce_scatter_rows(rows, None, group).wait()


def sum_in_rank_order(parts: torch.Tensor) -> torch.Tensor:
    """Add parts[0], parts[1], ... one after the other; half-precision parts in float32, rounded once.

    Args:
        parts: [ranks, ...]; its first block may be overwritten.

    Returns:
        [...] in the same dtype.
    """
    half = parts.dtype in (torch.bfloat16, torch.float16)
    total = parts[0].float() if half else parts[0]
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
