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
from megatron_moe_opt.runtime import joint_exchange
from megatron_moe_opt.runtime.exchange_plan import ExchangePlan, Parts
from megatron_moe_opt.runtime.executor import executor
from megatron_moe_opt.runtime.row_layout import RowLayout
from megatron_moe_opt.runtime.row_steps import (
    hop_to_experts,
    hop_to_sources,
    num_parts,
    scatter_to_shards,
    sum_over_shards,
)
from megatron_moe_opt.runtime.steps import Steps
from megatron_moe_opt.schedules import monta, parm
from megatron_moe_opt.schedules.pipeline import ChunkBytes
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


def to_experts(
    packed: torch.Tensor, exchange: Exchange, prob_dtype: torch.dtype, notes: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends packed rows to the ranks of their experts and sorts them by local expert. Differentiable.

    Args:
        packed: [R, H + lane], in the order of a row map cut into the plan's chunks; R is plan.num_sent or, with
            exchange.parts, the rows of the TP group, in the order of a map cut into its parts.
        prob_dtype: dtype of the probabilities in the lane.
        notes: int32 [plan.num_gathered], to be filled with the notes in the lanes (kernels.write_notes).

    Returns:
        Tokens [plan.num_gathered, H] and probabilities [plan.num_gathered], in stock Megatron's order.
    """
    return _ToExperts.apply(packed, exchange, prob_dtype, notes)


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
        ctx: Any, packed: torch.Tensor, exchange: Exchange, prob_dtype: torch.dtype, notes: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = exchange
        return run_to_experts(packed, exchange, prob_dtype, notes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: torch.Tensor, grad_probs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return run_to_sources(grad_tokens.contiguous(), grad_probs.contiguous(), ctx.exchange), None, None, None


class _ToSources(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return run_to_sources(rows.contiguous(), None, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return run_to_experts(grad.contiguous(), ctx.exchange, None)[0], None


def run_to_experts(
    rows: torch.Tensor, exchange: Exchange, prob_dtype: torch.dtype | None, notes: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[R, W] -> tokens [num_gathered, H] and, with prob_dtype, the probabilities in the lanes; not differentiable.

    `notes` as in `to_experts`.
    """
    groups, plan = exchange.groups, exchange.plan
    rows = exchange.own_rows(rows)
    layout = RowLayout(rows.size(1), rows.dtype, prob_dtype)
    move = groups.joint_size > 1
    gathered = layout.empty_rows(plan.num_gathered, rows) if move else rows
    tokens, probs = gathered, None
    in_place = prob_dtype is None and plan.arrives_sorted
    if not in_place:
        tokens = empty((plan.num_gathered, layout.hidden), rows.dtype, rows.device)
    if prob_dtype is not None:
        probs = empty((plan.num_gathered,), prob_dtype, rows.device)

    schedule = exchange.dispatch(layout.row_bytes)
    bound = []
    for op in schedule.ops:
        chunk = plan.chunks[op.chunk]
        if op.group == parm.JOINT:
            step = joint_exchange.to_all_shards(rows, gathered, chunk, groups)
        elif op.group is not None:
            step = hop_to_experts(op.kind, rows, gathered, chunk, groups)
        elif in_place:
            step = Steps()
        else:
            step = layout.split(gathered, tokens, probs, notes, chunk)
        bound.append(step)
    executor(rows.device).run(schedule, bound)
    return tokens, probs


def run_to_sources(tokens: torch.Tensor, probs: torch.Tensor | None, exchange: Exchange) -> torch.Tensor:
    """Tokens [num_gathered, H], with or without probabilities behind them -> rows [R, W]; not differentiable."""
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
    layout = RowLayout(tokens.size(1) + lane, tokens.dtype, None if probs is None else probs.dtype)
    in_place = probs is None and plan.arrives_sorted
    unsorted = tokens if in_place else layout.blank_rows(plan.num_gathered, tokens)
    num_arrived = sum(sum(chunk.receive_counts) for chunk in plan.chunks)
    fused = exchange.level is None
    summed = layout.blank_rows(num_arrived, tokens) if groups.etp_size > 1 and not fused else unsorted
    num_rows = plan.num_sent if exchange.parts is None else exchange.parts.num_rows
    all_rows = layout.blank_rows(num_rows, tokens) if groups.ep_size > 1 or fused else summed
    rows = exchange.own_rows(all_rows)

    schedule = exchange.combine(layout.row_bytes)
    sums: dict[int, Steps] = {}  # of each chunk, behind the exchange that brings what it adds

    def bind(op: Op) -> tuple[Steps, ...]:
        chunk = plan.chunks[op.chunk if exchange.parts is None else 0]
        if op.kind is Kind.SUM:
            return (sums.pop(op.chunk),)
        if exchange.parts is not None and op.writes != ("unsorted",):
            return joint_exchange.of_phase(op, unsorted, all_rows, chunk, exchange.parts, groups, layout)
        if op.group == parm.JOINT:
            everybody = range(groups.ep_size)
            return joint_exchange.from_all_shards(unsorted, rows, chunk, groups, layout, everybody, everybody)
        if op.kind is Kind.REDUCE_SCATTER:
            parts = layout.empty_rows(num_parts(chunk, groups), unsorted)
            total = sum_over_shards(unsorted, parts, summed, chunk, groups, layout)
            return scatter_to_shards(unsorted, parts, chunk, groups), total
        if op.kind is Kind.ALL_TO_ALL:
            return (hop_to_sources(summed, rows, chunk, groups),)
        return (Steps() if in_place else layout.join(tokens, probs, unsorted, chunk),)

    bound = []
    for op in schedule.ops:
        step, *later = bind(op)
        if later:
            (sums[op.chunk],) = later
        bound.append(step)
    return schedule, bound, all_rows
