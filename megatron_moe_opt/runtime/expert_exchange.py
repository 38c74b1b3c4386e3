"""Rows to their experts and back as a pipeline of chunks: differentiable functions around the executor.

`to_experts` runs all-to-all, all-gather and reorder; `to_sources` runs the mirror: reorder, reduce-scatter, all-to-all.
On Parm's way one all-to-all over both groups is in the place of the two collectives. The backward pass of each function
runs the other one on gradients.

Rows that all ranks of a TP group have (`Exchange.parts`) go to their experts once: each rank sends its part of them,
and they come back to all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_moe_opt.kernels import LANE_BYTES, empty
from megatron_moe_opt.runtime import steps
from megatron_moe_opt.runtime.exchange_plan import ChunkPlan, ExchangePlan, Parts
from megatron_moe_opt.runtime.executor import executor
from megatron_moe_opt.runtime.steps import Blocks, Steps, blocks_of
from megatron_moe_opt.schedules import monta, parm
from megatron_moe_opt.schedules.monta import ChunkBytes
from megatron_moe_opt.schedules.schedule import Kind, Op, Schedule
from megatron_moe_opt.topology.expert_groups import ExpertGroups


@dataclass(frozen=True)
class Exchange:
    """Between whom, what, and on which way."""

    groups: ExpertGroups
    plan: ExchangePlan
    level: str | None
    """MoNTA's level of pipelining; None: Parm's one all-to-all over both groups."""
    parts: Parts | None = None
    """How a TP group shares out its rows, on Parm's way and in one chunk; None: every rank has rows of its own."""

    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Those of `rows` that this rank sends and gets back itself."""
        return rows if self.parts is None else rows.narrow(0, self.parts.first_own, self.plan.num_sent)

    def dispatch(self, row_bytes: int) -> Schedule:
        """The schedule of rows on their way to their experts."""
        groups, sizes = self.groups, self._chunk_bytes(row_bytes)
        if self.level is None:
            return parm.dispatch(sizes, groups.etp_size)
        return monta.dispatch(self.level, sizes, groups.ep_size, groups.etp_size)

    def combine(self, row_bytes: int) -> Schedule:
        """The schedule of rows on their way back."""
        groups, sizes = self.groups, self._chunk_bytes(row_bytes)
        if self.parts is not None:
            gathered = sum(size.gathered for size in sizes)
            return parm.combine_and_gather(gathered, self.parts.phase_bytes(row_bytes), groups.etp_size)
        if self.level is None:
            return parm.combine(sizes, groups.etp_size)
        return monta.combine(self.level, sizes, groups.ep_size, groups.etp_size)

    def _chunk_bytes(self, row_bytes: int) -> tuple[ChunkBytes, ...]:
        return tuple(
            ChunkBytes(sum(chunk.send_counts) * row_bytes, sum(chunk.gather_counts) * row_bytes)
            for chunk in self.plan.chunks
        )


def to_experts(packed: torch.Tensor, exchange: Exchange, prob_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends packed rows to the ranks of their experts and sorts them by local expert. Differentiable.

    Args:
        packed: [R, H + lane], in the order of a row map cut into the plan's chunks; R is plan.num_sent or, with
            exchange.parts, the rows of the TP group, in the order of a map cut into its parts.
        prob_dtype: dtype of the probabilities in the lane.

    Returns:
        Tokens [plan.num_gathered, H] and probabilities [plan.num_gathered], in stock Megatron's order.
    """
    return _ToExperts.apply(packed, exchange, prob_dtype)


def to_sources(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Sums expert outputs over the expert-tensor-parallel ranks and sends them back to their tokens. Differentiable.

    Args:
        rows: [plan.num_gathered, H], sorted by local expert.

    Returns:
        [R, H], as `to_experts` takes them; sums are taken in rank order, half-precision rows in float32.
    """
    return _ToSources.apply(rows, exchange)


class _ToExperts(Function):
    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, exchange: Exchange, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = exchange
        return _run_to_experts(packed, exchange, prob_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: torch.Tensor, grad_probs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _run_to_sources(grad_tokens.contiguous(), grad_probs.contiguous(), ctx.exchange), None, None


class _ToSources(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return _run_to_sources(rows.contiguous(), None, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _run_to_experts(grad.contiguous(), ctx.exchange, None)[0], None


def _run_to_experts(
    rows: torch.Tensor, exchange: Exchange, prob_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[R, W] -> tokens [num_gathered, H] and, with prob_dtype, the probabilities in the lanes."""
    groups, plan = exchange.groups, exchange.plan
    rows = exchange.own_rows(rows)
    layout = _Layout(rows.size(1), rows.dtype, prob_dtype)
    move = groups.joint_size > 1
    gathered = layout.empty_rows(plan.num_gathered, rows) if move else rows
    tokens, probs = gathered, None
    in_place = prob_dtype is None and plan.arrives_sorted
    if not in_place:
        tokens = empty((plan.num_gathered, layout.hidden), rows.dtype, rows.device)
    if prob_dtype is not None:
        probs = empty((plan.num_gathered,), prob_dtype, rows.device)

    schedule = exchange.dispatch(layout.row_bytes)
    places = _places(plan, groups)
    bound = []
    for op in schedule.ops:
        chunk, place = plan.chunks[op.chunk], places[op.chunk]
        arrived = gathered.narrow(0, place.own, sum(chunk.receive_counts))
        if op.group == parm.JOINT:
            to, from_ = _joint_blocks(chunk, place, groups)
            step = steps.exchange(rows, to, gathered, from_, groups.joint, "all_to_all")
        elif op.kind is Kind.ALL_TO_ALL:
            sent = rows.narrow(0, place.sent, sum(chunk.send_counts))
            step = steps.all_to_all(sent, chunk.send_counts, arrived, chunk.receive_counts, groups.ep)
        elif op.kind is Kind.ALL_GATHER:
            own = arrived if groups.ep_size > 1 else rows.narrow(0, place.sent, sum(chunk.send_counts))
            all_rows = gathered.narrow(0, place.gathered, sum(chunk.gather_counts))
            step = steps.all_gather(own, all_rows, chunk.gather_counts, groups.etp)
        elif in_place:
            step = Steps()
        else:
            step = layout.split(gathered, tokens, probs, chunk)
        bound.append(step)
    executor(rows.device).run(schedule, bound)
    return tokens, probs


def _run_to_sources(tokens: torch.Tensor, probs: torch.Tensor | None, exchange: Exchange) -> torch.Tensor:
    """Tokens [num_gathered, H], with or without probabilities behind them -> rows [R, W]."""
    schedule, bound, rows = bind_to_sources(tokens, probs, exchange)
    executor(tokens.device).run(schedule, bound)
    return rows


def bind_to_sources(
    tokens: torch.Tensor, probs: torch.Tensor | None, exchange: Exchange
) -> tuple[Schedule, list[Steps], torch.Tensor]:
    """The schedule that sums and sends back, what its ops do (once), and the rows [R, W] that they will have written.

    Args:
        tokens: [plan.num_gathered, H].
        probs: [plan.num_gathered], to travel behind the tokens (W = H + lane); None: W = H.
    """
    groups, plan = exchange.groups, exchange.plan
    lane = 0 if probs is None else LANE_BYTES // tokens.element_size()
    layout = _Layout(tokens.size(1) + lane, tokens.dtype, None if probs is None else probs.dtype)
    in_place = probs is None and plan.arrives_sorted
    unsorted = tokens if in_place else layout.empty_rows(plan.num_gathered, tokens)
    num_arrived = sum(sum(chunk.receive_counts) for chunk in plan.chunks)
    fused = exchange.level is None
    summed = layout.empty_rows(num_arrived, tokens) if groups.etp_size > 1 and not fused else unsorted
    num_rows = plan.num_sent if exchange.parts is None else exchange.parts.num_rows
    all_rows = layout.empty_rows(num_rows, tokens) if groups.ep_size > 1 or fused else summed
    rows = exchange.own_rows(all_rows)

    schedule = exchange.combine(layout.row_bytes)
    places = _places(plan, groups)
    bound = []
    for op in schedule.ops:
        if exchange.parts is not None and op.writes != ("unsorted",):
            bound.append(_of_phase(op, exchange, unsorted, all_rows, layout))
            continue
        chunk, place = plan.chunks[op.chunk], places[op.chunk]
        arrived = summed.narrow(0, place.arrived, sum(chunk.receive_counts))
        if op.group == parm.JOINT:
            step = _sum_of_shards(unsorted, rows, chunk, place, groups, layout)
        elif op.kind is Kind.REDUCE_SCATTER:
            mine = sum(chunk.receive_counts)
            parts = layout.empty_rows((groups.etp_size - 1) * mine, tokens)
            of_peers = unsorted.narrow(0, place.gathered, sum(chunk.gather_counts))
            step = steps.reduce_scatter(of_peers, parts, arrived, chunk.gather_counts, groups.etp, layout.columns)
        elif op.kind is Kind.ALL_TO_ALL:
            back = rows.narrow(0, place.sent, sum(chunk.send_counts))
            step = steps.all_to_all(arrived, chunk.receive_counts, back, chunk.send_counts, groups.ep)
        elif in_place:
            step = Steps()
        else:
            step = layout.join(tokens, probs, unsorted, chunk)
        bound.append(step)
    return schedule, bound, all_rows


def _of_phase(op: Op, exchange: Exchange, unsorted: torch.Tensor, all_rows: torch.Tensor, layout: _Layout) -> Steps:
    """Of Parm's combine_and_gather: the rows of a phase's EP peers back from them, or shared over the TP group."""
    groups, plan, parts, phase = exchange.groups, exchange.plan, exchange.parts, op.chunk
    if op.group == parm.TP:
        own = parts.block(parts.group.rank(), phase)
        blocks = [parts.block(rank, phase) for rank in range(parts.group.size())]
        return steps.exchange(all_rows, [own] * len(blocks), all_rows, blocks, parts.group, "all_gather")
    (chunk,), (place,) = plan.chunks, _places(plan, groups)
    senders, receivers = parts.peers(groups.ep_rank, phase), parts.peers(groups.ep_rank, -phase)
    rows = exchange.own_rows(all_rows)
    return _sum_of_shards(unsorted, rows, chunk, place, groups, layout, senders, receivers, op.group)


def _joint_blocks(chunk: ChunkPlan, place: _Place, groups: ExpertGroups) -> tuple[Blocks, Blocks]:
    """For each rank of the joint group, its block of this rank's rows, the same for all shards of an expert; and the
    place of its own rows among the gathered ones.
    """
    to = [block for block in blocks_of(chunk.send_counts, place.sent) for _ in range(groups.etp_size)]
    by_shard = [
        blocks_of(counts, place.gathered + sum(chunk.gather_counts[:shard]))
        for shard, counts in enumerate(chunk.arriving_counts)
    ]
    return to, [by_shard[shard][ep_rank] for ep_rank in range(groups.ep_size) for shard in range(groups.etp_size)]


def _sum_of_shards(
    unsorted: torch.Tensor,
    rows: torch.Tensor,
    chunk: ChunkPlan,
    place: _Place,
    groups: ExpertGroups,
    layout: _Layout,
    senders: range | None = None,
    receivers: range | None = None,
    over: str | None = parm.JOINT,
) -> Steps:
    """Each shard's part of every row back from it, into a copy a shard; then their sum, in rank order.

    `senders` and `receivers` are the EP ranks that the rows come from and that get theirs; None: all. `over` is the
    group that they lie in; where that is not the joint group, both are this rank.
    """
    senders, receivers = (range(groups.ep_size) if peers is None else peers for peers in (senders, receivers))
    counts = [rows if peer in senders else 0 for peer, rows in enumerate(chunk.send_counts)]
    num_rows, first = sum(counts), place.sent + sum(chunk.send_counts[: senders.start])
    _, to = _joint_blocks(chunk, place, groups)
    parts = layout.empty_rows(groups.etp_size * num_rows, rows)
    by_shard = [blocks_of(counts, shard * num_rows) for shard in range(groups.etp_size)]
    summed = rows.narrow(0, first, num_rows)
    if over == parm.JOINT:
        joint_ranks = [(ep_rank, shard) for ep_rank in range(groups.ep_size) for shard in range(groups.etp_size)]
        to = [block if ep_rank in receivers else (0, 0) for block, (ep_rank, _) in zip(to, joint_ranks, strict=True)]
        from_ = [by_shard[shard][ep_rank] for ep_rank, shard in joint_ranks]
        step = steps.exchange(unsorted, to, parts, from_, groups.joint, "all_to_all")
    else:
        to = to[groups.ep_rank * groups.etp_size : (groups.ep_rank + 1) * groups.etp_size]
        if over is None:
            return steps.sum_parts([unsorted.narrow(0, *to[0])], summed, layout.columns)
        from_ = [blocks[groups.ep_rank] for blocks in by_shard]
        step = steps.exchange(unsorted, to, parts, from_, groups.etp, "reduce_scatter")
    return step + steps.sum_parts(parts.split(num_rows) if num_rows else [summed], summed, layout.columns)


class _Layout:
    """What a row on the wire holds: its hidden elements and, with prob_dtype, a lane with the bits of a probability."""

    def __init__(self, width: int, dtype: torch.dtype, prob_dtype: torch.dtype | None) -> None:
        self.width, self.dtype, self.prob_dtype = width, dtype, prob_dtype
        self.row_bytes = width * dtype.itemsize
        self.hidden_bytes = self.row_bytes - (LANE_BYTES if prob_dtype is not None else 0)
        self.hidden = self.hidden_bytes // dtype.itemsize
        self.columns = [(0, self.hidden, dtype)]
        """(first byte, elements, dtype) of what is summed in a row."""
        if prob_dtype is not None:
            self.columns.append((self.hidden_bytes, 1, prob_dtype))

    def empty_rows(self, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        return empty((num_rows, self.width), self.dtype, like.device)

    def split(self, rows: torch.Tensor, tokens: torch.Tensor, probs: torch.Tensor | None, chunk: ChunkPlan) -> Steps:
        """Rows in arrival order -> tokens (and probabilities) in expert order."""
        step = steps.copy_columns(rows, 0, tokens, 0, self.hidden_bytes, chunk.by_expert)
        if probs is not None:
            step += steps.copy_columns(rows, self.hidden_bytes, probs, 0, probs.element_size(), chunk.by_expert)
        return step

    def join(self, tokens: torch.Tensor, probs: torch.Tensor | None, rows: torch.Tensor, chunk: ChunkPlan) -> Steps:
        """The inverse of `split`; what the probability leaves of its lane is not written."""
        by_source = chunk.by_expert.inverse()
        step = steps.copy_columns(tokens, 0, rows, 0, self.hidden_bytes, by_source)
        if probs is not None:
            step += steps.copy_columns(probs, 0, rows, self.hidden_bytes, probs.element_size(), by_source)
        return step


@dataclass(frozen=True)
class _Place:
    """First rows of a chunk."""

    sent: int
    """Among this rank's own rows."""
    gathered: int
    """Among the rows of all expert-tensor-parallel peers."""
    own: int
    """Of this rank's block among those."""
    arrived: int
    """Among the rows that arrived at this rank."""


def _places(plan: ExchangePlan, groups: ExpertGroups) -> list[_Place]:
    sent = blocks_of([sum(chunk.send_counts) for chunk in plan.chunks])
    gathered = blocks_of([sum(chunk.gather_counts) for chunk in plan.chunks])
    arrived = blocks_of([sum(chunk.receive_counts) for chunk in plan.chunks])
    return [
        _Place(sent[c][0], first, first + sum(chunk.gather_counts[: groups.etp_rank]), arrived[c][0])
        for c, (chunk, (first, _)) in enumerate(zip(plan.chunks, gathered, strict=True))
    ]
