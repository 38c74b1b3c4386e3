"""Counts the messages and bytes that collectives send, by collective and by link.

The numbers follow a volume model, not the wire: the messages that a *direct* algorithm sends, in which every pair of
ranks that has something to exchange does so without a third rank in between. Ring and tree algorithms forward the same
data over other pairs, and framing (TCP headers, acknowledgements) is left out. With n ranks in the group, B the bytes
of this rank's input, and p a peer other than this rank (what a rank keeps for itself is a local copy, not a message):

    all_to_all       to each p: the rows split off for p (B / n without splits)
    all_gather       to each p: B
    reduce_scatter   to each p: the part that p will own (B / n)
    all_reduce       a reduce_scatter and an all_gather: to each p the part p owns, then the part this rank owns; over
                     the group, 2 (n - 1) / n B a rank. Parts differ by at most one element.
    broadcast        root only, to each p: B
    scatter          root only, to each p: its part
    reduce, gather   to the root only: B
    send             to the destination: B (a receive sends nothing)
    barrier          to each p: one message of 0 bytes

Apart from the barrier's, a message of 0 bytes is not sent and not counted. Coalesced and functional variants count
under the same names as the plain ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_moe_opt.runtime.observed.traffic_rows import INTER_NODE, INTRA_NODE, TrafficRow
from megatron_moe_opt.topology.agreement import known_to_all
from megatron_moe_opt.topology.nodes import NodeMap


class TrafficCounter(TorchDispatchMode):
    """Counts what this rank sends in the collectives that PyTorch code issues inside the context.

    It listens to the operators `torch.ops.c10d.*` (and the functional ones) through which every call of
    torch.distributed passes, synchronous or not, so it sees stock Megatron's collectives as well as ours. Backward is
    seen too: autograd runs it in the calling thread on CPU, and hands the caller's dispatch modes to its device threads
    on CUDA (both are carried by at::ThreadLocalState). Collectives that other threads start, or that C++ code calls on
    a process group directly, are not seen: who starts those reports them with `count_sent`. Counting costs some
    microseconds for every operator of the step: do not time a counted step.

        with TrafficCounter(nodes) as counter:
            loss.backward()
        rows = counter.reduce()
    """

    def __init__(self, nodes: NodeMap) -> None:
        super().__init__()
        self.nodes = nodes
        self._messages: Counter[tuple[str, int]] = Counter()  # by (collective, global rank of the peer)
        self._bytes: Counter[tuple[str, int]] = Counter()

    def __enter__(self) -> TrafficCounter:
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _active.remove(self)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Counts `func` where it is a collective, then runs it."""
        kwargs = kwargs or {}
        if func.namespace in _NAMESPACES:
            names = [argument.name for argument in func._schema.arguments]
            self._count(func._opname, dict(zip(names, args, strict=False)) | kwargs)
        return func(*args, **kwargs)

    def _count(self, operator: str, arguments: dict[str, Any]) -> None:
        has_group = "process_group" in arguments or "group_name" in arguments  # wait_tensor, for one, has none
        if operator in _RECEIVES or not has_group:
            return
        if operator not in _COLLECTIVES:
            raise NotImplementedError(f"TrafficCounter has no volume model for the collective {operator}")
        collective, messages_of = _COLLECTIVES[operator]
        group = _process_group(arguments)
        self._add(collective, group, messages_of(arguments, group.rank(), group.size()))

    def _add(self, collective: str, group: dist.ProcessGroup, messages: _Messages) -> None:
        ranks = dist.get_process_group_ranks(group)
        for peer, num_bytes in messages:
            self._messages[collective, ranks[peer]] += 1
            self._bytes[collective, ranks[peer]] += num_bytes

    def rows(self) -> tuple[TrafficRow, ...]:
        """Returns what this rank sent, by collective and link, in alphabetical order."""
        return sum_rows(
            TrafficRow(collective, self._link_to(peer), count, self._bytes[collective, peer])
            for (collective, peer), count in self._messages.items()
        )

    def _link_to(self, peer: int) -> str:
        return INTRA_NODE if self.nodes.same_node(dist.get_rank(), peer) else INTER_NODE

    def bytes_to(self) -> list[int]:
        """Returns the bytes that this rank sent to each global rank, [world size]."""
        sent = [0] * dist.get_world_size()
        for (_, peer), num_bytes in self._bytes.items():
            sent[peer] += num_bytes
        return sent

    def reduce(self, group: dist.ProcessGroup | None = None) -> tuple[TrafficRow, ...]:
        """Returns the sum of `rows()` over the ranks of `group` (the world where None), the same on all of them.

        A collective call; make it after leaving the context, or it counts itself.
        """
        return sum_rows(row for rows in known_to_all(self.rows(), group) for row in rows)


def sum_rows(rows: Iterable[TrafficRow]) -> tuple[TrafficRow, ...]:
    """Adds up the rows of equal collective and link; sorted by both."""
    messages: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for row in rows:
        messages[row.collective, row.link] += row.messages
        num_bytes[row.collective, row.link] += row.bytes
    return tuple(TrafficRow(*key, messages[key], num_bytes[key]) for key in sorted(messages))


class SentBytes:
    """Counts what this rank reports with `count_sent` between `start` and `stop`: what the schedules of our dispatchers
    send.

    It sees no operator, and so costs what it counts and no more: fit for passes that are timed.
    """

    def __init__(self) -> None:
        self.by_peer: Counter[int] = Counter()
        """Bytes sent, by the global rank that they are sent to."""

    def start(self) -> None:
        """Adds what is reported from now on to `by_peer`."""
        _active.append(self)

    def stop(self) -> None:
        """Listens no more; nothing where it does not."""
        if self in _active:
            _active.remove(self)

    def _add(self, collective: str, group: dist.ProcessGroup, messages: _Messages) -> None:
        ranks = dist.get_process_group_ranks(group)
        for peer, num_bytes in messages:
            self.by_peer[ranks[peer]] += num_bytes


_active: list[TrafficCounter | SentBytes] = []


def count_sent(collective: str, group: dist.ProcessGroup, bytes_to: Sequence[int]) -> None:
    """Tells the active counters that this rank sends bytes_to[p] bytes to each peer p of `group`."""
    _tell(_active, collective, group, bytes_to)


def count_issued(collective: str, group: dist.ProcessGroup, bytes_to: Sequence[int]) -> None:
    """Does what `count_sent` does, for what elsewhere is an operator of torch.distributed;
    SentBytes does not see it.
    """
    _tell([counter for counter in _active if isinstance(counter, TrafficCounter)], collective, group, bytes_to)


def _tell(
    counters: Sequence[TrafficCounter | SentBytes], collective: str, group: dist.ProcessGroup, bytes_to: Sequence[int]
) -> None:
    if counters:
        messages = _to_peers(lambda peer: bytes_to[peer], group.rank(), group.size())
        for counter in counters:
            counter._add(collective, group, messages)


# The volume model. Each function takes an operator's arguments by name, this rank and the size of the group, and
# returns the messages this rank sends: (peer's rank in the group, bytes).

_Messages = list[tuple[int, int]]


def _num_bytes(tensors: torch.Tensor | Sequence[torch.Tensor]) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_num_bytes(tensor) for tensor in tensors)


def _own_input(arguments: dict[str, Any]) -> Any:
    """Returns this rank's tensor or tensors, whatever the operator calls them."""
    names = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensor", "tensors")
    return next(arguments[name] for name in names if name in arguments)


def _to_peers(bytes_of: Callable[[int], int], rank: int, size: int) -> _Messages:
    """Returns one message to each peer that gets any bytes."""
    return [(peer, bytes_of(peer)) for peer in range(size) if peer != rank and bytes_of(peer)]


def _all_to_all(arguments: dict[str, Any], rank: int, size: int) -> _Messages:
    rows = arguments["input"]
    splits = arguments["input_split_sizes"] or [rows.size(0) // size] * size
    row_bytes = _num_bytes(rows) // max(rows.size(0), 1)
    return _to_peers(lambda peer: splits[peer] * row_bytes, rank, size)


def _all_to_all_list(arguments: dict[str, Any], rank: int, size: int) -> _Messages:
    tensors = arguments["input_tensors"]
    return _to_peers(lambda peer: _num_bytes(tensors[peer]), rank, size)


def _all_gather(arguments: dict[str, Any], rank: int, size: int) -> _Messages:
    num_bytes = _num_bytes(_own_input(arguments))
    return _to_peers(lambda peer: num_bytes, rank, size)


def _reduce_scatter(arguments: dict[str, Any], rank: int, size: int) -> _Messages:
    part_bytes = _num_bytes(_own_input(arguments)) // size
    return _to_peers(lambda peer: part_bytes, rank, size)


def _reduce_scatter_list(arguments: dict[str, Any], rank: int, size: int) -> _Messages:
    (parts,) = arguments["input_tensors"]
    return _to_peers(lambda peer: _num_bytes(parts[peer]), rank, size)


def _all_reduce(arguments: dict[str, Any], rank: int, size: int) -> _Messages:
    tensors = _own_input(arguments)
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors

    def part_bytes(owner: int) -> int:
        return sum((t.numel() // size + (owner < t.numel() % size)) * t.element_size() for t in tensors)

    return _to_peers(part_bytes, rank, size) + _to_peers(lambda peer: part_bytes(rank), rank, size)


def _broadcast(arguments: dict[str, Any], rank: int, size: int) -> _Messages:
    root = arguments["root_rank"] if "root_rank" in arguments else arguments["src"]
    return _all_gather(arguments, rank, size) if rank == root else []


def _scatter(arguments: dict[str, Any], rank: int, size: int) -> _Messages:
    return _reduce_scatter_list(arguments, rank, size) if rank == arguments["root_rank"] else []


def _to_root(arguments: dict[str, Any], rank: int, size: int) -> _Messages:
    num_bytes = _num_bytes(_own_input(arguments))
    return [(arguments["root_rank"], num_bytes)] if rank != arguments["root_rank"] and num_bytes else []


def _send(arguments: dict[str, Any], rank: int, size: int) -> _Messages:
    num_bytes = _num_bytes(_own_input(arguments))
    return [(arguments["dst"], num_bytes)] if num_bytes else []


def _barrier(arguments: dict[str, Any], rank: int, size: int) -> _Messages:
    return [(peer, 0) for peer in range(size) if peer != rank]


_NAMESPACES = ("c10d", "_c10d_functional")

_RECEIVES = ("recv_", "recv_any_source_", "irecv")

_COLLECTIVES: dict[str, tuple[str, Callable[[dict[str, Any], int, int], _Messages]]] = {
    # torch.ops.c10d
    "alltoall_base_": ("all_to_all", _all_to_all),
    "alltoall_": ("all_to_all", _all_to_all_list),
    "allgather_": ("all_gather", _all_gather),
    "_allgather_base_": ("all_gather", _all_gather),
    "allgather_coalesced_": ("all_gather", _all_gather),
    "allgather_into_tensor_coalesced_": ("all_gather", _all_gather),
    "reduce_scatter_": ("reduce_scatter", _reduce_scatter_list),
    "_reduce_scatter_base_": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _reduce_scatter),
    "allreduce_": ("all_reduce", _all_reduce),
    "allreduce_coalesced_": ("all_reduce", _all_reduce),
    "broadcast_": ("broadcast", _broadcast),
    "scatter_": ("scatter", _scatter),
    "reduce_": ("reduce", _to_root),
    "gather_": ("gather", _to_root),
    "send": ("send", _send),
    "barrier": ("barrier", _barrier),
    "monitored_barrier_": ("barrier", _barrier),
    # torch.ops._c10d_functional
    "all_to_all_single": ("all_to_all", _all_to_all),
    "all_gather_into_tensor": ("all_gather", _all_gather),
    "all_gather_into_tensor_out": ("all_gather", _all_gather),
    "all_gather_into_tensor_coalesced": ("all_gather", _all_gather),
    "reduce_scatter_tensor": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_tensor_out": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _reduce_scatter),
    "all_reduce": ("all_reduce", _all_reduce),
    "all_reduce_": ("all_reduce", _all_reduce),
    "all_reduce_coalesced": ("all_reduce", _all_reduce),
    "all_reduce_coalesced_": ("all_reduce", _all_reduce),
    "broadcast": ("broadcast", _broadcast),
    "isend": ("send", _send),
}


def _process_group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    group = arguments["group_name"]  # a name; newer PyTorch also passes the group itself
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
