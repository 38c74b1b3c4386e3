"""The ops that `moe-opt profile` measures, each at any size, as training issues them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.dispatchers.monta import MontaDispatcher
from megatron_moe_opt.dispatchers.pipelining import FixedPipelining
from megatron_moe_opt.integration.measuring.meter import Load, Sized, SizedPipeline
from megatron_moe_opt.kernels import ChunkList
from megatron_moe_opt.planning.costs.cluster import Points
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.rows.exchange_plan import Sharing, plan_exchange, share_out
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange, bind_to_sources
from megatron_moe_opt.runtime.rows.row_layout import Payload
from megatron_moe_opt.runtime.rows.ways import EpWithExpertTp
from megatron_moe_opt.runtime.through_experts.expert_call import ExpertCall, Experts
from megatron_moe_opt.runtime.travelling_experts import expert_gradients
from megatron_moe_opt.runtime.travelling_experts.expert_codec import ResidualMessages
from megatron_moe_opt.schedules.memory_reuse import Restore
from megatron_moe_opt.schedules.pipeline import even_parts
from megatron_moe_opt.schedules.schedule import Kind, Lane, Schedule
from megatron_moe_opt.topology.expert_groups import ExpertGroups, TokenCopies
from megatron_moe_opt.topology.nodes import NodeMap

_CHUNKS = 32  # of a reorder: source ranks times experts of a rank
CODEC_RATIO = 50.0  # HybridEP's; what does not travel is read, too, and takes the most time
_COPIED_BYTES = 32 * 2**20  # that small copies go around in, so that they do not find their rows in a cache


@dataclass(frozen=True)
class Rows:
    """The rows that are moved: hidden states of tokens, of one width and type."""

    hidden: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """Returns the bytes of one row."""
        return self.hidden * self.dtype.itemsize

    def number(self, size: int, multiple: int) -> int:
        """Returns how many rows have about `size` bytes: a positive multiple of `multiple`."""
        return max(1, round(size / (self.bytes * multiple))) * multiple

    def filled(self, rows: int) -> torch.Tensor:
        """Returns [rows, hidden] of random numbers: zeros could all be one page of memory, or be multiplied at less
        power.
        """
        return torch.rand(rows, self.hidden, device=self.device).to(self.dtype)


def all_to_all(rows: Rows, group: ProcessGroup, role: str, lane: Lane) -> Load:
    """Returns an all-to-all in which every rank sends as much to each."""

    def sized(size: int) -> Sized:
        number = rows.number(size, group.size())
        sent, received = rows.filled(number), rows.filled(number)
        counts = [number // group.size()] * group.size()
        return Sized(number * rows.bytes, lambda: steps.all_to_all(sent, counts, received, counts, group))

    return Load(Kind.ALL_TO_ALL, lane, role, sized)


def all_gather(rows: Rows, group: ProcessGroup, role: str, lane: Lane) -> Load:
    """Returns an all-gather to which every rank brings as much."""

    def sized(size: int) -> Sized:
        number = rows.number(size, group.size())
        own, gathered = rows.filled(number // group.size()), rows.filled(number)
        counts = [number // group.size()] * group.size()
        return Sized(number * rows.bytes, lambda: steps.all_gather(own, gathered, counts, group))

    return Load(Kind.ALL_GATHER, lane, role, sized)


def combine_and_gather(
    rows: Rows, groups: ExpertGroups, tp: ProcessGroup, overlap: bool
) -> Callable[[int], SizedPipeline]:
    """Returns Parm's SAA, as training runs it, where every rank has one expert and as many rows for each; without
    overlap, AAS. The size is that of the rows that come back to a rank for itself, times expert-TP. A collective call
    over all groups.
    """
    sharing, payload = Sharing(TokenCopies.of(tp, groups), rows.bytes, overlap), Payload(rows.hidden, rows.dtype)

    def sized(size: int) -> SizedPipeline:
        number = rows.number(size, groups.joint_size)  # of an expert; for one expert there is nothing to reorder
        of_tp_group = number // groups.joint_size * tp.size()
        counts = torch.full((groups.ep_size, groups.etp_size, groups.ep_size), of_tp_group)
        ranks = groups.ep_rank, groups.etp_rank
        sent, parts = share_out(counts, *ranks, sharing)
        exchange = Exchange(EpWithExpertTp(groups, payload, parts), plan_exchange(sent, *ranks, 1, rows.device))
        outputs = rows.filled(number)

        def bind() -> tuple[Schedule, Sequence[Steps]]:
            moving, bound, _ = bind_to_sources(outputs, None, exchange)
            return moving.schedule, bound

        return SizedPipeline(number * rows.bytes, bind)

    return sized


def there_and_back(rows: Rows, groups: ExpertGroups, size: int, chunks: int) -> Callable[[], None]:
    """Returns a move of about `size` bytes of this rank's rows to their experts and back, by the dispatcher that
    training uses, at level O3; every expert gets as many.
    """
    number, experts = rows.number(size, 1), 2 * groups.ep_size  # with one expert a rank there is nothing to reorder
    tokens, probs = rows.filled(number), torch.ones(number, experts, device=rows.device)
    routing_map = torch.arange(number, device=rows.device).view(-1, 1) % experts == probs.cumsum(1) - 1
    dispatcher = MontaDispatcher(groups, FixedPipelining("O3", chunks))

    def run() -> None:
        packed, dispatched = dispatcher.permute(tokens, probs, routing_map, num_rows=number)
        moved, _, _ = dispatcher.dispatch(packed, dispatched, probs.dtype)
        dispatcher.unpermute(dispatcher.combine(moved, dispatched), dispatched)

    return run


def reduce_scatter(rows: Rows, group: ProcessGroup, role: str, lane: Lane) -> Load:
    """Returns a reduce-scatter of which every rank keeps as much."""

    def sized(size: int) -> Sized:
        number = rows.number(size, group.size())
        mine = number // group.size()
        added, parts, summed = rows.filled(number), rows.filled(number - mine), rows.filled(mine)
        counts = [mine] * group.size()

        def exchange_and_sum() -> steps.Steps:
            return steps.scatter(added, parts, counts, group) + steps.sum_scattered(added, parts, summed, counts, group)

        return Sized(number * rows.bytes, exchange_and_sum)

    return Load(Kind.REDUCE_SCATTER, lane, role, sized)


def ring(rows: Rows, world: ProcessGroup, rings: list[list[int]], role: str, lane: Lane) -> Load:
    """Returns an op in which every rank of a ring sends to the next one, all at once; ranks in no ring do nothing."""
    rank = world.rank()
    own = next((ring for ring in rings if rank in ring), [rank])
    position = own.index(rank)
    to, from_ = own[(position + 1) % len(own)], own[position - 1]

    def sized(size: int) -> Sized:
        number = rows.number(size, 1) if len(own) > 1 else 0
        sent, received = rows.filled(number), rows.filled(number)

        def blocks(peer: int) -> list[tuple[int, int]]:
            return [(0, number if other == peer else 0) for other in range(world.size())]

        exchanged = blocks(to), blocks(from_)
        return Sized(
            rows.number(size, 1) * rows.bytes,
            lambda: steps.exchange(sent, exchanged[0], received, exchanged[1], world, "send"),
        )

    return Load(Kind.SEND_RECEIVE, lane, role, sized)


def rings_inside(nodes: NodeMap) -> list[list[int]]:
    """Returns the ranks of each node that has several."""
    return [list(nodes.ranks_of(node)) for node in range(nodes.num_nodes) if len(nodes.ranks_of(node)) > 1]


def rings_between(nodes: NodeMap) -> list[list[int]]:
    """Returns the first ranks of all nodes, the second ones, and so on."""
    ranks = [nodes.ranks_of(node) for node in range(nodes.num_nodes)]
    rings = [[on[place] for on in ranks if len(on) > place] for place in range(max(map(len, ranks)))]
    return [ring for ring in rings if len(ring) > 1]


def copy(rows: Rows) -> Load:
    """Returns the reorder of rows from source rank to local expert."""

    def sized(size: int) -> Sized:
        number = rows.number(size, 1)
        places = max(1, _COPIED_BYTES // (number * rows.bytes))
        source, target = (rows.filled(places * number).split(number) for _ in range(2))
        pairs = cycle(zip(source, target, strict=True))
        order = [*range(0, _CHUNKS, 2), *range(1, _CHUNKS, 2)]
        chunks = ChunkList.from_counts(even_parts(number, _CHUNKS), order, rows.device)
        return Sized(number * rows.bytes, lambda: steps.copy_rows(*next(pairs), chunks))

    return Load(Kind.COPY, Lane.COPY, None, sized)


def host_transfer(rows: Rows, kind: Kind) -> Load:
    """Returns a copy. Kind.OFFLOAD: device to host memory, pinned for a GPU; Kind.PREFETCH: back."""
    on_cuda = rows.device.type == "cuda"

    def sized(size: int) -> Sized:
        number = rows.number(size, 1)
        places = max(1, _COPIED_BYTES // (number * rows.bytes))
        on_device = torch.ones(places * number, rows.hidden, dtype=rows.dtype, device=rows.device)
        on_host = torch.ones(places * number, rows.hidden, dtype=rows.dtype, pin_memory=on_cuda)
        target, source = (on_host, on_device) if kind is Kind.OFFLOAD else (on_device, on_host)
        pairs = cycle(zip(target.split(number), source.split(number), strict=True))

        def copy_next() -> None:
            to, from_ = next(pairs)
            to.copy_(from_, non_blocking=on_cuda)

        return Sized(number * rows.bytes, lambda: steps.call(copy_next))

    return Load(kind, Lane.D2H if kind is Kind.OFFLOAD else Lane.H2D, None, sized)


def codec(rows: Rows, kind: Kind) -> Load:
    """Returns an op of the codec on an expert that travels compressed, or on its gradient: sized in bytes of what is
    encoded, or of what decoding makes, of a gradient in float32.
    """
    of_gradient = kind in (Kind.ENCODE_GRADIENT, Kind.DECODE_GRADIENT)
    dtype = torch.float32 if of_gradient else rows.dtype

    def sized(size: int) -> Sized:
        numel = max(1, size // dtype.itemsize)
        messages = ResidualMessages(1, numel, rows.dtype, CODEC_RATIO)
        expert, base = (torch.randn(numel, device=rows.device).to(dtype) for _ in range(2))
        sent, held = messages.empty(rows.device), base.clone()

        def encode() -> None:
            messages.encode(expert, [base], sent)
            messages.decode(sent, held)  # not the base, from which there would soon be nothing left to tell

        encode()
        ops: dict[Kind, Callable[[], object]] = {
            Kind.ENCODE: encode,
            Kind.DECODE: lambda: messages.decode(sent, held),
            Kind.ENCODE_GRADIENT: lambda: expert_gradients.encode(messages, expert, base, sent),
            Kind.DECODE_GRADIENT: lambda: expert_gradients.sum_messages(messages, [sent, expert], 1, held),
        }
        return Sized(numel * dtype.itemsize, lambda: steps.call(ops[kind]))

    return Load(kind, Lane.COPY, None, sized)


@dataclass(frozen=True)
class RankExperts:
    """Experts of a rank, called as a layer calls them: all in one go, each with as many rows."""

    experts: Experts
    number: int

    def passes(self, rows: Rows, of_each: int, training: bool = False) -> Callable[[], None]:
        """Returns a forward pass on so many rows of each expert, or with `training` also its backward pass, whose
        weight gradients are added to those of other partitions, in float32. Called as mpmoe calls experts: what the
        forward pass keeps of one has left the caches when its backward pass comes, as in training.
        """
        parameters = self.experts.parameters if training else ()
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        tokens, grad = (rows.filled(of_each * self.number) for _ in range(2))
        counts = torch.full((self.number,), of_each)
        probs = torch.ones(of_each * self.number, device=rows.device)

        def add(parameter: int, gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                sums[parameter] += gradient

        def run() -> None:
            call = ExpertCall(self.experts, counts, probs, Restore.KEEP, set())
            call.forward(tokens)
            if training:
                call.backward(tokens, grad, add)

        return run

    def load(self, rows: Rows, training: bool = False) -> Load:
        """Returns `passes` as an op, sized in rows of each expert instead of bytes."""

        def sized(of_each: int) -> Sized:
            run = self.passes(rows, of_each, training)
            return Sized(of_each, lambda: steps.call(run))

        return Load(Kind.COMPUTE, Lane.COMPUTE, None, sized, is_whole=True)

    def of_one(self, points: Points) -> Points:
        """Returns the part of an expert of what `load` takes."""
        return tuple((of_each, seconds / self.number) for of_each, seconds in points)
