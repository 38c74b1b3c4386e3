"""torch.distributed over Gloo where Megatron expects NCCL.

Groups asked for with NCCL are made with Gloo; what Gloo lacks (reduce-scatter, unequal lengths, averages, coalescing)
is built from what it has, through `runtime.engine.collectives`, so that a dispatcher which calls those functions sums
in the order that stock Megatron sums in. Every collective that fails says which one it was, on which group and rank.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_moe_opt.integration.patching import replace
from megatron_moe_opt.runtime.engine.collectives import (
    Waitable,
    check_counts,
    named_errors,
    start_all_gather_rows,
    start_exchange_on_gloo,
    start_reduce_scatter_rows,
)
from megatron_moe_opt.runtime.engine.steps import blocks_of

# Collectives that take (..., group=, async_op=) and need nothing but a name on their errors.
NAMED = ("all_gather_into_tensor", "all_to_all", "broadcast", "gather", "reduce", "scatter")
NAMED_POINT_TO_POINT = ("send", "recv", "irecv")


class HostWork:
    """A Gloo operation under way whose `wait()` names failures and does the part that Gloo could not.

    `finish` runs once, after the first successful wait.
    """

    def __init__(
        self, op: str, group: dist.ProcessGroup | None, work: Waitable, finish: Callable[[], None] | None = None
    ) -> None:
        self.op = op
        self.group = group
        self.work = work
        self._finish = finish

    def wait(self, *args: Any) -> bool:
        """Block until the result is there. Raises CollectiveError where Gloo failed."""
        with named_errors(self.op, self.group):
            self.work.wait(*args)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True


# The works issued inside `coalescing_manager` on this thread, newest manager last.
_coalescing = threading.local()


def _hand_over(work: HostWork, async_op: bool) -> HostWork | None:
    """Return the work, or wait for it. A coalescing manager keeps it too: Megatron drops the handle there."""
    if not async_op:
        work.wait()
        return None
    if getattr(_coalescing, "works", None) is not None:
        _coalescing.works.append(work)
    return work


class _CoalescedWorks:
    """What `coalescing_manager` yields: waits for every work that was issued inside it."""

    def __init__(self) -> None:
        self.works: list[HostWork] = []

    def append(self, work: HostWork) -> None:
        """Add a work by hand, as torch's own manager allows."""
        self.works.append(work)

    def wait(self) -> None:
        """Waits until all operations are complete."""
        for work in self.works:
            work.wait()
        self.works = []


@contextmanager
def coalescing_manager(
    group: dist.ProcessGroup | None = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[_CoalescedWorks]:
    """Replaces torch's `_coalescing_manager`: Gloo coalesces nothing, so the operations run one by one."""
    del group, device, async_ops
    outer = getattr(_coalescing, "works", None)
    manager = _CoalescedWorks()
    _coalescing.works = manager.works
    try:
        yield manager
    finally:
        _coalescing.works = outer


def _named(op: str) -> Callable[[Any], Any]:
    """Returns an adaptation that puts a collective's name on its errors, those of its asynchronous work included."""

    def adapt(original: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            with named_errors(op, group):
                work = original(*args, **kwargs)
            return work if work is None else _hand_over(HostWork(op, group, work), async_op=True)

        return collective

    return adapt


def _named_point_to_point(op: str) -> Callable[[Any], Any]:
    """Returns an adaptation that names a transfer's errors: send and recv return a rank or nothing, others a work."""

    def adapt(original: Callable[..., Any]) -> Callable[..., Any]:
        def transfer(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            with named_errors(op, group):
                result = original(*args, **kwargs)
            return HostWork(op, group, result) if isinstance(result, dist.Work) else result

        return transfer

    return adapt


# Sends that nobody has waited for yet, the oldest first, by group and there by receiver and tag.
_sends: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int | None, int | None, int], deque[dist.Work]]] = (
    WeakKeyDictionary()
)


class _Send(HostWork):
    """A send under way, kept until it, or a later one to the same rank, has been waited for.

    Gloo forgets a send whose work is dropped before the receiver asks for it, and Megatron's interleaved schedule drops
    the last one of a forward pass. Sends from one rank to another complete in the order in which they were made.
    """

    def __init__(self, group: dist.ProcessGroup | None, work: dist.Work, not_waited_for: deque[dist.Work]) -> None:
        super().__init__("isend", group, work)
        self._not_waited_for = not_waited_for
        not_waited_for.append(work)

    def wait(self, *args: Any) -> bool:
        """Block until the tensor has been sent. Raises CollectiveError where Gloo failed."""
        super().wait(*args)
        while self.work in self._not_waited_for:
            self._not_waited_for.popleft()
        return True


def _isend(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sends what the tensor holds now: Megatron takes the storage from an output that is still being sent.

    On CUDA the caching allocator keeps the memory for the stream that reads it. Gloo's threads get a tensor of their
    own over the storage, and the work keeps it.
    """

    def isend(
        tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
    ) -> HostWork | None:
        with named_errors("isend", group):
            work = original(tensor.detach(), dst, group, tag, group_dst)
        if work is None:  # this rank is not in the group
            return None
        of_group = _sends.setdefault(group or dist.group.WORLD, {})
        return _Send(group, work, of_group.setdefault((dst, group_dst, tag), deque()))

    return isend


@dataclass(frozen=True)
class ScaledSum:
    """NCCL's sum of what each rank has multiplied (Megatron-FSDP's mean), for which Gloo sums and then multiplies."""

    factor: float


def _scale_of(op: Any, group: Any) -> float | None:
    """Returns the factor by which a sum becomes this reduction, which Gloo lacks; None: the reduction is Gloo's own."""
    if isinstance(op, ScaledSum):
        return op.factor
    return 1 / dist.get_world_size(group) if op == dist.ReduceOp.AVG else None


def _all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts all_reduce: Gloo has no average, so it sums, then scales."""

    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> HostWork | None:
        scale = _scale_of(op, group)
        with named_errors("all_reduce", group):
            work = original(tensor, op if scale is None else dist.ReduceOp.SUM, group, async_op=True)
        if work is None:  # this rank is not in the group
            return None
        finish = None if scale is None else functools.partial(tensor.mul_, scale)
        return _hand_over(HostWork("all_reduce", group, work, finish), async_op)

    return all_reduce


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts all_gather: Gloo gathers equal lengths only; unequal ones (dropless, expert-TP > 1) go as rows."""

    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> HostWork | None:
        if all(part.shape == tensor.shape for part in tensor_list):
            with named_errors("all_gather", group):
                work = original(tensor_list, tensor, group=group, async_op=True)
            return None if work is None else _hand_over(HostWork("all_gather", group, work), async_op)
        counts = [part.numel() for part in tensor_list]
        with named_errors("all_gather", group):
            pending = start_all_gather_rows(tensor.reshape(-1), counts, group)

        def fill() -> None:
            for part, gathered in zip(tensor_list, pending.wait().split(counts), strict=True):
                part.copy_(gathered.view(part.shape))

        return _hand_over(HostWork("all_gather", group, pending, fill), async_op)

    return all_gather


def _start_reduce_scatter(
    output: torch.Tensor, rows: torch.Tensor, counts: list[int], op: Any, group: Any, async_op: bool, name: str
) -> HostWork | None:
    """Sum `rows`, flat and in rank order, and put this rank's part into `output`."""
    scale = _scale_of(op, group)
    if scale is None and op != dist.ReduceOp.SUM:
        raise ValueError(f"{name}: reduction {op} is not supported on the host, use SUM or AVG")
    with named_errors(name, group):
        pending = start_reduce_scatter_rows(rows, counts, group)

    def fill() -> None:
        total = pending.wait()
        if scale is not None:
            total.mul_(scale)
        output.copy_(total.view(output.shape))

    return _hand_over(HostWork(name, group, pending, fill), async_op)


def _reduce_scatter_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts reduce_scatter_tensor: equal parts, summed in rank order like the unequal ones."""
    del original

    def reduce_scatter_tensor(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 (torch's own argument name)
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> HostWork | None:
        counts = [output.numel()] * dist.get_world_size(group)
        return _start_reduce_scatter(output, input.reshape(-1), counts, op, group, async_op, "reduce_scatter_tensor")

    return reduce_scatter_tensor


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts reduce_scatter: parts of any lengths, summed in rank order."""
    del original

    def reduce_scatter(
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> HostWork | None:
        rows = torch.cat([part.reshape(-1) for part in input_list])
        counts = [part.numel() for part in input_list]
        return _start_reduce_scatter(output, rows, counts, op, group, async_op, "reduce_scatter")

    return reduce_scatter


def _all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces all_to_all_single by the exchange that our own all-to-alls are on Gloo, so that stock's and ours take
    the links alike: Gloo's own sends to a rank before it says that it will receive, and then the one direction waits
    for the other. Megatron passes split sizes as numpy arrays.
    """

    def counts(sizes: Sequence[int] | None, rows: torch.Tensor, group: Any) -> list[int]:
        size = dist.get_world_size(group)
        given = [rows.shape[0] // size] * size if sizes is None or not len(sizes) else [int(count) for count in sizes]
        check_counts("all_to_all_single", given, rows.shape[0], group, "split sizes")
        return given

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 (torch's own argument name)
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> HostWork | None:
        if dist.get_rank(group) < 0:  # torch's own warns
            return original(output, input, output_split_sizes, input_split_sizes, group, async_op)
        receive, send = counts(output_split_sizes, output, group), counts(input_split_sizes, input, group)
        with named_errors("all_to_all_single", group):
            work = start_exchange_on_gloo("all_to_all", input, blocks_of(send), output, receive, group)
        return _hand_over(HostWork("all_to_all_single", group, work), async_op)

    return all_to_all_single


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts barrier: a Gloo barrier takes no device ids."""

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> HostWork | None:
        del device_ids
        with named_errors("barrier", group):
            work = original(group=group, async_op=True)
        return None if work is None else _hand_over(HostWork("barrier", group, work), async_op)

    return barrier


def _gloo_backend(backend: str | None) -> str | None:
    return "gloo" if backend is not None and "nccl" in str(backend).lower() else backend


def _init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts init_process_group: NCCL named explicitly is Gloo here, and NCCL's options and the device that it
    would bind have no meaning.
    """

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        original(_gloo_backend(backend) or "gloo", *args, **kwargs)

    return init_process_group


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a new group, made as the default group was."""

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, pg_options: Any = None, **kwargs: Any
    ) -> Any:
        del pg_options
        kwargs.pop("device_id", None)
        return original(ranks=ranks, timeout=timeout, backend=_gloo_backend(backend), **kwargs)

    return new_group


def _share_device(original: type) -> type:
    """Adapts ProcessGroupGloo to share a network device: Gloo opens one, and a thread that polls it, for every group,
    and Megatron makes dozens of groups.

    One for all groups is enough, and leaves the processor to the ranks.
    """

    @functools.cache
    def devices() -> list[Any]:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        return [original.create_device(interface=name) for name in interfaces] or [original.create_default_device()]

    class SharedDeviceGloo(original):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **asked: Any) -> None:
            if any(asked.values()):  # of a newer torch (2.14: enable_reconfigure), which takes no options beside them
                super().__init__(store, rank, size, timeout=timeout, **asked)
                return
            options = original._Options()
            options._timeout, options._devices, options._threads = timeout, devices(), 2  # 2 is Gloo's default
            super().__init__(store, rank, size, options)

    return SharedDeviceGloo


def _set_pg_timeout(original: Callable[..., Any]) -> Callable[..., None]:
    """Replaces `_set_pg_timeout`: torch's own does not see that a group with `_share_device`'s class is Gloo's."""

    def set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        (group or dist.group.WORLD)._get_backend(torch.device("cpu"))._set_default_timeout(timeout)

    return set_pg_timeout


def use_host_collectives() -> None:
    """Adapt torch.distributed, under the names that Megatron and torch itself call."""
    adaptations: dict[str, Callable[[Any], Any]] = {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter_tensor": _reduce_scatter_tensor,
        "reduce_scatter": _reduce_scatter,
        "all_to_all_single": _all_to_all_single,
        "barrier": _barrier,
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "_coalescing_manager": lambda original: coalescing_manager,
        "isend": _isend,
        "_make_nccl_premul_sum": lambda original: ScaledSum,
        **{name: _named(name) for name in NAMED},
        **{name: _named_point_to_point(name) for name in NAMED_POINT_TO_POINT},
    }
    replace(c10d, "ProcessGroupGloo", _share_device)
    replace(c10d, "_set_pg_timeout", _set_pg_timeout)
    for name, adapt in adaptations.items():
        replace(dist, name, adapt)
        # torch's own callers (object collectives, checkpoints) look names up in the defining module.
        setattr(c10d, name, getattr(dist, name))
