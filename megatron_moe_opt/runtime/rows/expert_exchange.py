"""Rows to their experts and back as a pipeline of chunks: differentiable functions around the executor.

`to_experts` sends rows on their way (runtime/rows/ways.py) and sorts them by expert; `to_sources` runs the mirror. The
backward pass of each function runs the other one on gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from megatron_moe_opt.kernels import empty
from megatron_moe_opt.row_format import WireFormat
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.engine.started import advance_started
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.rows.row_layout import AtExperts
from megatron_moe_opt.runtime.rows.ways import Way
from megatron_moe_opt.runtime.rows.wire_rows import WireRows, off_wire, onto_wire
from megatron_moe_opt.schedules.pipeline import base_name
from megatron_moe_opt.schedules.schedule import MovingSchedule, Op

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Exchange(Generic[Plan]):
    """A way of rows, and what goes on it: a plan of the way's kind."""

    way: Way[Plan]
    plan: Plan

    def tensors(
        self, given: dict[str, torch.Tensor], make: Callable[[str, int], torch.Tensor]
    ) -> Callable[[str, int], torch.Tensor]:
        """Returns a function that gives the tensor behind the buffer of a chunk: one given for all chunks, or made at
        first use.

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
    packed: torch.Tensor,
    wire: WireRows,
    exchange: Exchange,
    prob_dtype: torch.dtype,
    notes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends packed rows to the ranks of their experts and sorts them by local expert. Differentiable once.

    Args:
        packed: stands for the rows on the wire, in the order of a row map cut into the plan's chunks: plan.num_sent of
            them or, where a TP group shares rows out, those of the group, in the order of a map cut into its parts.
        prob_dtype: dtype of the probabilities in the lane.
        notes: int32 [plan.num_gathered], to be filled with the notes in the lanes (kernels.write_notes).

    Returns:
        Tokens [plan.num_gathered, H] and probabilities [plan.num_gathered], in stock Megatron's order.
    """
    return off_wire(
        packed,
        wire,
        lambda rows: run_to_experts(rows, exchange, prob_dtype, notes),
        lambda grad_tokens, grad_probs: run_to_sources(grad_tokens, grad_probs, exchange),
    )


def to_sources(rows_NH: torch.Tensor, wire: WireRows, exchange: Exchange) -> torch.Tensor:
    """Sums expert outputs over the expert-tensor-parallel ranks and sends them back to their tokens. Differentiable
    once.

    Args:
        rows_NH: [plan.num_gathered, H], sorted by local expert.

    Returns:
        What stands for the rows on the wire, as many and in the order that `to_experts` takes; sums are taken in rank
        order, half-precision rows in float32.
    """
    return onto_wire(
        wire,
        lambda rows_NH: run_to_sources(rows_NH.contiguous(), None, exchange),
        lambda grad: run_to_experts(grad, exchange, None)[:1],
        rows_NH,
    )


def run_to_experts(
    rows: torch.Tensor, exchange: Exchange, prob_dtype: torch.dtype | None, notes: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sends rows [R, W] to the experts: returns tokens [num_gathered, H] and, with prob_dtype, the probabilities in the
    lanes; not differentiable.

    `notes` as in `to_experts`.
    """
    way, plan = exchange.way, exchange.plan
    layout = way.outbound(prob_dtype)
    tensor = exchange.tensors({"rows": rows}, lambda _, number: layout.empty_rows(number, rows))
    in_place = prob_dtype is None and plan.arrives_sorted and layout.wire is WireFormat.SAME
    tokens = probs = None
    if not in_place:
        tokens = empty((plan.num_gathered, layout.hidden), layout.dtype, rows.device)
    if prob_dtype is not None:
        probs = empty((plan.num_gathered,), prob_dtype, rows.device)

    def bind(op: Op) -> Steps:
        source = tensor(op.reads[0], op.chunk)
        if base_name(op.writes[0]) != "sorted":
            return way.step_out(op, source, tensor(op.writes[0], op.chunk), plan)
        return Steps() if in_place else way.sort(AtExperts(source, tokens, probs, notes, plan, op.chunk, layout))

    schedule, sized = way.dispatch(plan, layout.row_bytes)
    executor(rows.device).run(schedule, [bind(op) for op in schedule.ops], sized=sized)
    if in_place:
        tokens = tensor(schedule.ops[-1].reads[0], 0)  # the last op sorts
    return tokens, probs


def run_to_sources(tokens: torch.Tensor, probs: torch.Tensor | None, exchange: Exchange) -> torch.Tensor:
    """Sends tokens [num_gathered, H], with probabilities behind them or not, back: rows [R, W]; not differentiable."""
    advance_started()  # what runs beside has had the experts' time
    (schedule, sized), bound, rows = bind_to_sources(tokens, probs, exchange)
    executor(tokens.device).run(schedule, bound, sized=sized)
    return rows


def bind_to_sources(
    tokens: torch.Tensor, probs: torch.Tensor | None, exchange: Exchange
) -> tuple[MovingSchedule, list[Steps], torch.Tensor]:
    """Returns the schedule of the way back, the steps of each op (to be run once), and the tensor [R, W] that has the
    rows afterwards.

    Args:
        tokens: [plan.num_gathered, H].
        probs: [plan.num_gathered], to travel behind the tokens; None: rows have no lane.
    """
    way, plan = exchange.way, exchange.plan
    layout = way.homebound(None if probs is None else probs.dtype)
    tokens = tokens.to(layout.dtype)
    in_place = probs is None and plan.arrives_sorted and layout.wire is WireFormat.SAME
    given = {"sorted": tokens} | ({"unsorted": tokens} if in_place else {})

    def make(buffer: str, number: int) -> torch.Tensor:
        return (layout.at_source if buffer == "rows" else layout).blank_rows(number, tokens)

    tensor = exchange.tensors(given, make)

    def bind(op: Op) -> Steps:
        written = tensor(op.writes[0], op.chunk)
        if base_name(op.reads[0]) == "sorted":
            here = AtExperts(written, tokens, probs, None, plan, op.chunk, layout)
            return Steps() if in_place else way.unsort(here)
        return way.step_back(op, [tensor(name, op.chunk) for name in op.reads], written, plan, layout)

    moving = way.combine(plan, layout.row_bytes)
    ops = moving.schedule.ops
    return moving, [bind(op) for op in ops], tensor(ops[-1].writes[0], 0)
