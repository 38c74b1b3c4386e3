"""Differentiable moves of rows between ranks. The backward of each is its mirror image.

A packed row is a token's H elements with a lane behind them that carries its probability
(megatron_moe_opt.kernels.packed_rows).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.distributed import ProcessGroup

from megatron_moe_opt.kernels import LANE_BYTES, copy_chunks, join_chunks, split_chunks
from megatron_moe_opt.runtime.collectives import all_gather_rows, all_to_all_rows, sum_in_rank_order
from megatron_moe_opt.runtime.exchange_plan import ExchangePlan
from megatron_moe_opt.runtime.traffic import issued_as


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, receive_counts: list[int], send_counts: list[int], group: ProcessGroup
    ) -> torch.Tensor:
        ctx.receive_counts, ctx.send_counts, ctx.group = receive_counts, send_counts, group
        return all_to_all_rows(rows, receive_counts, send_counts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows = all_to_all_rows(grad, ctx.send_counts, ctx.receive_counts, ctx.group)
        return rows, None, None, None


class _GatherByExpert(Function):
    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, plan: ExchangePlan, group: ProcessGroup, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.plan, ctx.group, ctx.prob_dtype = plan, group, prob_dtype
        if len(plan.gather_counts) > 1:
            packed = all_gather_rows(packed, plan.gather_counts, group)
        return split_chunks(packed, plan.by_expert, prob_dtype)

    @staticmethod
    def backward(
        ctx: Any, grad_tokens: torch.Tensor, grad_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        packed = join_chunks(grad_tokens.contiguous(), grad_probs.contiguous(), ctx.plan.by_expert)
        if len(ctx.plan.gather_counts) > 1:
            packed = _sum_packed(_rows_of_peers(packed, ctx.plan.gather_counts, ctx.group), ctx.prob_dtype)
        return packed, None, None, None


class _ReduceToSource(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, plan: ExchangePlan, group: ProcessGroup) -> torch.Tensor:
        ctx.plan, ctx.group = plan, group
        rows = rows.contiguous()
        if plan.tokens_per_expert.numel() > 1:  # one local expert: both orders are the same
            rows = copy_chunks(rows, plan.by_expert.inverse())
        if len(plan.gather_counts) > 1:
            rows = sum_in_rank_order(_rows_of_peers(rows, plan.gather_counts, group))
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        plan, grad = ctx.plan, grad.contiguous()
        if len(plan.gather_counts) > 1:
            grad = all_gather_rows(grad, plan.gather_counts, ctx.group)
        if plan.tokens_per_expert.numel() > 1:
            grad = copy_chunks(grad, plan.by_expert)
        return grad, None, None


# The reduce-scatters below are an all-to-all and a local sum: it moves no more bytes than a ring, takes packed rows
# whole, adds half-precision rows in float32 without sending float32 (stock Megatron sends it), and has one order of
# addition on every backend.


def _rows_of_peers(rows: torch.Tensor, counts: list[int], group: ProcessGroup) -> torch.Tensor:
    """Gives each rank its counts[rank] rows of every peer: [sum(counts), W] -> [ranks, counts[rank], W]."""
    mine = counts[group.rank()]
    with issued_as("reduce_scatter"):
        parts = all_to_all_rows(rows, [mine] * group.size(), counts, group)
    return parts.view(group.size(), mine, rows.size(1))


def _sum_packed(parts: torch.Tensor, prob_dtype: torch.dtype) -> torch.Tensor:
    """Sums packed rows over ranks: [ranks, R, H + lane] -> [R, H + lane]."""
    hidden = parts.size(2) - LANE_BYTES // parts.element_size()
    packed = parts[0]
    packed[:, :hidden] = sum_in_rank_order(parts[:, :, :hidden])
    lanes = parts[:, :, hidden:].contiguous().view(prob_dtype)
    packed[:, hidden:] = sum_in_rank_order(lanes).view(parts.dtype)
    return packed


def all_to_all(
    rows: torch.Tensor, receive_counts: list[int], send_counts: list[int], group: ProcessGroup
) -> torch.Tensor:
    """Sends send_counts[i] consecutive rows to rank i of `group` and returns what arrives, in rank order.

    Args:
        rows: [sum(send_counts), W].

    Returns:
        [sum(receive_counts), W]; `rows` itself where the group has one rank.
    """
    if group.size() == 1:
        return rows
    return _AllToAll.apply(rows, receive_counts, send_counts, group)


def gather_by_expert(
    packed: torch.Tensor, plan: ExchangePlan, group: ProcessGroup, prob_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers packed rows over the expert-tensor-parallel `group` and sorts them by local expert.

    Args:
        packed: [plan.gather_counts[rank], H + lane].
        prob_dtype: dtype of the probabilities in the lane.

    Returns:
        Tokens [R, H] and probabilities [R], R = sum(plan.gather_counts).
    """
    return _GatherByExpert.apply(packed, plan, group, prob_dtype)


def reduce_to_source(rows: torch.Tensor, plan: ExchangePlan, group: ProcessGroup) -> torch.Tensor:
    """Sorts rows back to arrival order and sums them over the expert-tensor-parallel `group`.

    Args:
        rows: [sum(plan.gather_counts), H], sorted by local expert.

    Returns:
        [plan.gather_counts[rank], H]: this rank's rows, summed in rank order (float32 accumulation for half types).
    """
    return _ReduceToSource.apply(rows, plan, group)
