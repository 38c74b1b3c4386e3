"""Collectives as NCCL runs them: on a stream of their communicator, in the order of issue, while the caller goes on.

Messages between two ranks are NCCL's too: a batch of them is one piece of work of the group's communicator; outside of
a batch two ranks have a communicator of their own.

Bytes move over Gloo, at once; those of messages by the time when they are waited for. What each rank issued is kept, so
that the ranks can be compared: a communicator whose ranks issue other collectives, or ranks that wait for each other in
a circle, would hang on NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.integration.host.gloo import _hand_over
from megatron_moe_opt.runtime.engine.steps import blocks_of
from megatron_moe_opt.runtime.observed import traffic
from tests.accelerator.clocks import Actor
from tests.accelerator.communicators import Mismatch, meet
from tests.accelerator.memory import tensors_in
from tests.accelerator.software import Device, Queues, Stuck
from tests.accelerator.watch import Watch, ordering_places

_exchange = load_extension().exchange  # of the host, whatever is patched later

MESSAGES = ("isend", "irecv")


@dataclass(frozen=True)
class Issued:
    """What a rank issued at once: a collective, or a batch of messages."""

    calls: tuple[tuple[str, str], ...]
    """Communicators and collectives: one, or all messages of a batch, which end together."""
    beside: bool = False
    """Whether what is issued later runs beside it: a message outside of a batch."""


@dataclass(frozen=True, eq=False)
class Message:
    """A send or a receive; `to` and `of` are ranks of the world."""

    tensor: torch.Tensor
    of: int
    to: int
    start: Callable[[], Any]
    """Begins to move the bytes; returns a work of Gloo."""

    def __str__(self) -> str:
        return f"message of rank {self.of} to rank {self.to}"


class Work:
    """dist.Work of a collective on its communicator's stream; it holds what it uses until it is waited for."""

    def __init__(self, communicators: Communicators, actor: Actor, held: Any, moving: Sequence[Any] = ()) -> None:
        self._communicators, self._clock, self._held, self._moving = communicators, dict(actor.clock), held, moving

    def wait(self, *_: Any) -> bool:
        streams = self._communicators.watch.streams
        for work in self._moving:
            work.wait()
        streams.order(streams.current, self._clock, ordering_places())
        self._held, self._moving = None, ()
        return True

    def is_completed(self) -> bool:
        return True

    synchronize = wait


class Communicators:
    """The communicators of a rank, their ranks, and what was issued to them in turn."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.issued = watch, list[Issued]()
        self.members: dict[str, list[int]] = {}
        self.on_host = False
        """Whether a collective of the host's tensors runs, which is no matter of these."""
        self._batch: list[Message] | None = None
        """Messages of a batch that is being put together."""

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Returns torch.distributed's functions as they run here."""
        ours = {
            "all_reduce": self._all_reduce, "all_gather": self._all_gather, "reduce_scatter": self._reduce_scatter,
            "all_gather_into_tensor": self._all_gather_tensor, "_all_gather_base": self._all_gather_tensor,
            "reduce_scatter_tensor": self._reduce_scatter_tensor, "_reduce_scatter_base": self._reduce_scatter_tensor,
            "all_to_all_single": self._all_to_all, "broadcast": self._broadcast,
        }  # fmt: skip
        patched = {name: self._patched(getattr(dist, name), function) for name, function in ours.items()}
        messages = {name: self._message(getattr(dist, name), name == "isend") for name in MESSAGES}
        return patched | messages | {"batch_isend_irecv": self._batched(dist.batch_isend_irecv)}

    def _patched(self, stock: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, group: Any = None, async_op: bool = False, **settings: Any) -> Work | None:
            if isinstance(arguments[-1], dist.ProcessGroup):
                *arguments, group = arguments
            if all(map(self.watch.is_host, tensors_in([arguments, settings]))):
                self.on_host = True
                try:
                    return stock(*arguments, group=group, async_op=async_op, **settings)
                finally:
                    self.on_host = False
            work = function(group or dist.group.WORLD, *arguments, **settings)
            return _hand_over(work, async_op)  # to a coalescing manager too

        return run

    def _broadcast(
        self, group: Any, tensor: torch.Tensor, src: int | None = None, group_src: int | None = None
    ) -> Work:
        root = dist.get_group_rank(group, src) if group_src is None else group_src
        sends, tensor = group.rank() == root, tensor.detach()
        _count("broadcast_", group, tensors=[tensor], root_rank=root)

        def move() -> None:
            nothing = tensor.new_empty(0)
            sent = [tensor.contiguous() if sends else nothing] * group.size()
            received = [torch.empty_like(tensor) if rank == root else nothing for rank in range(group.size())]
            exchange(group, received, sent)
            tensor.copy_(received[root])

        return self.issue(group, "broadcast", [tensor] * sends, [tensor] * (not sends), move)

    def _message(self, stock: Callable[..., Any], sends: bool) -> Callable[..., Any]:
        """Wraps isend or irecv: it runs beside all else, on the stream of a communicator of the two
        ranks; or as part of a batch.
        """

        def run(
            tensor: torch.Tensor, peer: int | None = None, group: Any = None, tag: int = 0,
            group_peer: int | None = None, **named: int | None,
        ) -> Any:  # fmt: skip
            peer = named.get("dst" if sends else "src", peer)
            group_peer = named.get("group_dst" if sends else "group_src", group_peer)

            def start() -> Any:
                return stock(tensor, peer, group, tag, group_peer)

            if self.watch.is_host(tensor):
                return start()
            among = group or dist.group.WORLD
            ours, theirs = dist.get_rank(), dist.get_global_rank(among, group_peer) if peer is None else peer
            if sends:
                _count("send", among, tensors=[tensor], dst=dist.get_group_rank(among, theirs))
            message = Message(tensor, *((ours, theirs) if sends else (theirs, ours)), start)
            if self._batch is not None:
                self._batch.append(message)
                return None
            pair = f"{among.group_name}, ranks {min(ours, theirs)} and {max(ours, theirs)}"
            self.members[pair] = [message.of, message.to]
            return self._send_and_receive(pair, [message], Issued(((pair, str(message)),), beside=True))

        return run

    def _batched(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps batch_isend_irecv: its messages are over together, behind what the group's
        communicator does already.
        """

        def run(ops: Sequence[dist.P2POp]) -> list[Any]:
            if all(self.watch.is_host(op.tensor) for op in ops):
                return stock(ops)
            self._batch = batch = []
            try:
                for op in ops:
                    op.op(op.tensor, op.peer, op.group, op.tag)
            finally:
                self._batch = None
            name = ops[0].group.group_name
            calls = tuple((f"{name}, {message}", str(message)) for message in batch)
            self.members |= {way: [one.of, one.to] for (way, _), one in zip(calls, batch, strict=True)}
            return [self._send_and_receive(name, batch, Issued(calls))]

        return run

    def _send_and_receive(self, communicator: str, messages: Sequence[Message], issued: Issued) -> Work:
        rank, moving = dist.get_rank(), []
        sent, received = ([one.tensor for one in messages if (one.of == rank) is sends] for sends in (True, False))
        work = self._issue(
            communicator, communicator, issued, " and ".join(map(str, messages)), sent, received,
            lambda: moving.extend(one.start() for one in messages), moving,
        )  # fmt: skip
        for one in messages:  # NCCL records them: who sends may drop the work
            self.watch.memory.record(one.tensor, self.watch.streams.of_groups[communicator])
        return work

    def _all_reduce(self, group: Any, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        _count("allreduce_", group, tensors=[tensor])

        def move() -> None:
            parts = [torch.empty_like(tensor) for _ in range(group.size())]
            exchange(group, parts, [tensor.contiguous()] * group.size())
            tensor.copy_(_reduced(parts, op))

        return self.issue(group, "all_reduce", [tensor], [tensor], move)

    def _all_gather(self, group: Any, gathered: Sequence[torch.Tensor], own: torch.Tensor) -> Work:
        own = own.detach()
        _count("allgather_", group, input_tensors=[own])
        return self.issue(group, "all_gather", [own], gathered, lambda: exchange(group, gathered, [own] * group.size()))

    def _all_gather_tensor(self, group: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> Work:
        return self._all_gather(group, output_tensor.view(group.size(), *input_tensor.shape).unbind(), input_tensor)

    def _reduce_scatter(
        self, group: Any, output: torch.Tensor, parts: Sequence[torch.Tensor], op: Any = dist.ReduceOp.SUM
    ) -> Work:
        _count("reduce_scatter_", group, input_tensors=[parts])

        def move() -> None:
            found = [torch.empty_like(output) for _ in range(group.size())]
            exchange(group, found, [part.detach() for part in parts])
            output.copy_(_reduced(found, op))

        return self.issue(group, "reduce_scatter", parts, [output], move)

    def _reduce_scatter_tensor(
        self, group: Any, output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM
    ) -> Work:
        return self._reduce_scatter(group, output, input.view(group.size(), *output.shape).unbind(), op)

    def _all_to_all(
        self, group: Any, output: torch.Tensor, input: torch.Tensor,
        output_split_sizes: Any = None, input_split_sizes: Any = None,
    ) -> Work:  # fmt: skip
        splits = None if input_split_sizes is None else [int(size) for size in input_split_sizes]
        _count("alltoall_base_", group, input=input, input_split_sizes=splits)
        sides = (output, output_split_sizes), (input.detach(), splits)
        received, sent = (
            rows.split(len(rows) // group.size() if sizes is None else [int(size) for size in sizes])
            for rows, sizes in sides
        )
        return self.issue(group, "all_to_all", [input], [output], lambda: exchange(group, received, sent))

    def issue(
        self, group: Any, name: str, reads: Sequence[Any], writes: Sequence[Any], move: Callable[[], None]
    ) -> Work:
        """Queues a collective behind what is queued on the current stream."""
        self.members[group.group_name] = dist.get_process_group_ranks(group)
        issued, what = Issued(((group.group_name, name),)), f"{name} of {group.group_desc}"
        return self._issue(group.group_name, group.group_desc, issued, what, reads, writes, move)

    def _issue(
        self, communicator: str, called: str, issued: Issued, what: str, reads: Sequence[Any], writes: Sequence[Any],
        move: Callable[[], None], moving: Sequence[Any] = (),
    ) -> Work:  # fmt: skip
        streams = self.watch.streams
        actor = streams.of_groups.get(communicator)
        if actor is None:
            actor = streams.of_groups[communicator] = streams.new(f"the stream of {called}")
        streams.launch(streams.current)
        streams.order(actor, streams.current.clock)
        self.issued.append(issued)
        self.watch.ran(what, reads, writes, actor=actor)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            move()
        return Work(self, actor, (reads, writes), moving)


def _count(operator: str, group: Any, **arguments: Any) -> None:
    """Tells those who count traffic of an operator of torch.ops.c10d that runs here in another way."""
    for counter in traffic._active:
        if isinstance(counter, traffic.TrafficCounter):
            counter._count(operator, arguments | {"group_name": group})


def exchange(group: Any, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
    """An all-to-all of blocks of any sizes."""
    rows = torch.cat([block.detach().reshape(-1) for block in sent])
    counts = [block.numel() for block in received]
    arrived = torch.empty(sum(counts), dtype=rows.dtype)
    _exchange(group, rows, blocks_of([block.numel() for block in sent]), arrived, blocks_of(counts)).run()
    for block, part in zip(received, arrived.split(counts), strict=True):
        block.copy_(part.view(block.shape))


def _reduced(parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Reduces in rank order, in the precision of a sum that is rounded once."""
    stacked = torch.stack(list(parts))
    if op == dist.ReduceOp.MAX:
        return stacked.amax(0)
    if op == dist.ReduceOp.MIN:
        return stacked.amin(0)
    half = stacked.dtype in (torch.bfloat16, torch.float16)
    total = (stacked.float() if half else stacked).sum(0)
    return (total / len(parts) if op == dist.ReduceOp.AVG else total).to(stacked.dtype)


@dataclass(frozen=True)
class Findings:
    """The findings of one rank."""

    mistakes: list[str]
    """Races, and memory given back too early."""
    issued: list[Issued]
    """The collectives in the order in which they were issued."""
    members: dict[str, list[int]]
    """The ranks of each communicator."""


def check(of_ranks: Sequence[Findings]) -> None:
    """Raises AssertionError where a rank made a mistake, or its collectives would hang on NCCL."""
    for rank, found in enumerate(of_ranks):
        assert not found.mistakes, f"rank {rank}: {found.mistakes[:5]}"
    members = {name: ranks for found in of_ranks for name, ranks in found.members.items()}
    found = disagreements([found.issued for found in of_ranks], members)
    assert not found, found


def disagreements(of_ranks: Sequence[Sequence[Issued]], members: Mapping[str, Sequence[int]]) -> list[str]:
    """What would hang on NCCL, where each rank starts its collectives one after another, in its order of issue.

    Args:
        of_ranks: [ranks] what each rank issued, in turn.
        members: the ranks of each communicator.
    """
    devices = {rank: Device(Queues.ONE) for rank in range(len(of_ranks))}
    for rank, issued in enumerate(of_ranks):
        before = None
        for one in issued:
            calls = [devices[rank].launch(("group", name), [before], label=what) for name, what in one.calls]
            if not one.beside:
                before = calls[0] if len(calls) == 1 else devices[rank].launch("batches", calls)
    try:
        meet(devices, {name: [ranks] for name, ranks in members.items()})
    except (Mismatch, Stuck) as error:
        return [str(error)]
    return []
