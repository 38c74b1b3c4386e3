"""Rows to their experts and back as a pipeline of chunks: differentiable functions around the executor.

`to_experts` sends rows on their way (runtime/rows/ways.py) and sorts them by expert; `to_sources` runs the mirror. The
backward pass of each function runs the other one on gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_moe_opt.kernels import empty
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.engine.started import advance_started
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.rows.linear import linear
from megatron_moe_opt.runtime.rows.ways import Way
from megatron_moe_opt.schedules.pipeline import base_name
from megatron_moe_opt.schedules.schedule import Op, Schedule

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Exchange(Generic[Plan]):
    """What goes on which way, by a plan of the way's kind."""

    way: Way[Plan]
    plan: Plan

    def tensors(
        self, given: dict[str, torch.Tensor], make: Callable[[str, int], torch.Tensor]
    ) -> Callable[[str, int], torch.Tensor]:
        """The tensor behind the buffer of a chunk: one given for all chunks, or made at first use.

        Args:
            make: (buffer without its slot, rows) -> a tensor.
        """
        made = dict(given)

        def tensor(buffer: str, chunk: int) -> torch.Tensor:
            name = base_name(buffer)
            name = self.way.lies_in.get(name, name)
            key = buffer if name == "parts" else name
            if key not in made:
                made[key] = make(name, self.way.num_rows(name, self.plan, chunk))
            return made[key]

        return tensor


def to_experts(
    packed_RP: torch.Tensor, exchange: Exchange, prob_dtype: torch.dtype, notes: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends packed rows to the ranks of their experts and sorts them by local expert. Differentiable.

    Args:
        packed_RP: [R, H + lane], in the order of a row map cut into the plan's chunks; R is plan.num_sent or, where a
            TP group shares rows out, those of the group, in the order of a map cut into its parts.
        prob_dtype: dtype of the probabilities in the lane.
        notes: int32 [plan.num_gathered], to be filled with the notes in the lanes (kernels.write_notes).

    Returns:
        Tokens [plan.num_gathered, H] and probabilities [plan.num_gathered], in stock Megatron's order.
    """
    return _RowsToExperts.apply(packed_RP, exchange, prob_dtype, notes)


def to_sources(rows_NH: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Sums expert outputs over the expert-tensor-parallel ranks and sends them back to their tokens. Differentiable.

    Args:
        rows_NH: [plan.num_gathered, H], sorted by local expert.

    Returns:
        [R, H], as `to_experts` takes them; sums are taken in rank order, half-precision rows in float32.
    """
    return linear(
        rows_NH,
        lambda rows_NH: run_to_sources(rows_NH.contiguous(), None, exchange),
        lambda grad: run_to_experts(grad.contiguous(), exchange, None)[0],
    )


class _RowsToExperts(Function):
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


def run_to_experts(
    rows: torch.Tensor, exchange: Exchange, prob_dtype: torch.dtype | None, notes: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[R, W] -> tokens [num_gathered, H] and, with prob_dtype, the probabilities in the lanes; not differentiable.

    `notes` as in `to_experts`.
    """
    way, plan = exchange.way, exchange.plan
    layout = way.outbound(rows, prob_dtype)
    tensor = exchange.tensors({"rows": rows}, lambda _, number: layout.empty_rows(number, rows))
    in_place = prob_dtype is None and plan.arrives_sorted
    tokens = probs = None
    if not in_place:
        tokens = empty((plan.num_gathered, layout.hidden), rows.dtype, rows.device)
    if prob_dtype is not None:
        probs = empty((plan.num_gathered,), prob_dtype, rows.device)

    def bind(op: Op) -> Steps:
        source = tensor(op.reads[0], op.chunk)
        if base_name(op.writes[0]) != "sorted":
            return way.step_out(op, source, tensor(op.writes[0], op.chunk), plan)
        return Steps() if in_place else way.sort(source, tokens, probs, notes, plan, op.chunk, layout)

    schedule = way.dispatch(plan, layout.row_bytes)
    executor(rows.device).run(schedule, [bind(op) for op in schedule.ops])
    if in_place:
        tokens = tensor(schedule.ops[-1].reads[0], 0)  # the last op sorts
    return tokens, probs


def run_to_sources(tokens: torch.Tensor, probs: torch.Tensor | None, exchange: Exchange) -> torch.Tensor:
    """Tokens [num_gathered, H], with or without probabilities behind them -> rows [R, W]; not differentiable."""
    advance_started()  # what runs beside has had the experts' time
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
    way, plan = exchange.way, exchange.plan
    layout = way.homebound(tokens, None if probs is None else probs.dtype)
    in_place = probs is None and plan.arrives_sorted
    given = {"sorted": tokens} | ({"unsorted": tokens} if in_place else {})

    def make(buffer: str, number: int) -> torch.Tensor:
        return (layout.at_source if buffer == "rows" else layout).blank_rows(number, tokens)

    tensor = exchange.tensors(given, make)

    def bind(op: Op) -> Steps:
        written = tensor(op.writes[0], op.chunk)
        if base_name(op.reads[0]) == "sorted":
            return Steps() if in_place else way.unsort(tokens, probs, written, plan, op.chunk, layout)
        return way.step_back(op, [tensor(name, op.chunk) for name in op.reads], written, plan, layout)

    schedule = way.combine(plan, layout.row_bytes)
    bound = [bind(op) for op in schedule.ops]
    return schedule, bound, tensor(schedule.ops[-1].writes[0], 0)
