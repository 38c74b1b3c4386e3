"""Hops of tokens in chunks, each a way of its own: one is on the links between nodes while another is inside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import torch

from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.hops.hop_plan import HopPlan
from megatron_moe_opt.runtime.hops.hop_way import Hops
from megatron_moe_opt.runtime.rows.row_layout import AtExperts, Layout
from megatron_moe_opt.schedules.hops import HopStages, outline
from megatron_moe_opt.schedules.pipeline import base_name
from megatron_moe_opt.schedules.schedule import MovingSchedule, Op
from megatron_moe_opt.topology.domain_groups import DomainGroups


@dataclass(frozen=True)
class HopPlans:
    """The plans of hops of all chunks."""

    chunks: tuple[HopPlan, ...]
    num_gathered: int
    """Rows of the experts held here, of all chunks."""
    bounds: dict[str, list[int]] = field(default_factory=dict)
    """Where the rows of each chunk begin in a buffer, and where the last ones end, by the buffer's name."""

    arrives_sorted: ClassVar[bool] = False

    @cached_property
    def of_experts(self) -> torch.Tensor:
        """Returns the rows of each expert held here, chunk by chunk, int64 [chunks, experts] on the CPU."""
        return torch.stack([plan.tokens_per_expert for plan in self.chunks])

    @cached_property
    def tokens_per_expert(self) -> torch.Tensor:
        """Returns the rows of each expert held here, of all chunks, int64 on the CPU."""
        return self.of_experts.sum(0)

    @property
    def first(self) -> torch.Tensor:
        """Returns where each chunk's rows of each expert begin among those of all chunks, int64 [chunks, experts]."""
        whole = self.tokens_per_expert
        return (whole.cumsum(0) - whole) + (self.of_experts.cumsum(0) - self.of_experts)


@dataclass
class HopsInChunks:
    """Chunks of tokens that hop, each by a way of its own. A buffer holds the rows of all, one after another."""

    chunks: Sequence[Hops]

    lies_in: ClassVar[Mapping[str, str]] = HopStages.lies_in

    @property
    def groups(self) -> DomainGroups:
        """Returns the groups between whose ranks rows move."""
        return self.chunks[0].groups

    @property
    def stages(self) -> HopStages:
        """Returns the stages of one partition in a pipeline with the experts."""
        return self.chunks[0].stages

    def dispatch(self, plan: HopPlans, row_bytes: int) -> MovingSchedule:
        """Returns the schedule of rows to their experts, chunk by chunk."""
        return self._moving("hop out", plan, row_bytes)

    def combine(self, plan: HopPlans, row_bytes: int) -> MovingSchedule:
        """Returns the schedule of rows back to their sources."""
        return self._moving("hop back", plan, row_bytes)

    def _moving(self, direction: str, plan: HopPlans, row_bytes: int) -> MovingSchedule:
        return outline(direction, self.stages, len(self.chunks)).moving(
            lambda: [way.rows_of(own).bytes(row_bytes) for way, own in zip(self.chunks, plan.chunks, strict=True)]
        )

    def num_rows(self, buffer: str, plan: HopPlans, chunk: int) -> int:
        """Returns the rows that a buffer has to hold; of `parts`, for one chunk."""
        if buffer == "sorted":
            return plan.num_gathered
        bounds = self._bounds(buffer, plan)
        return bounds[chunk + 1] - bounds[chunk] if buffer == "parts" else bounds[-1]

    def _bounds(self, buffer: str, plan: HopPlans) -> list[int]:
        if buffer not in plan.bounds:
            numbers = (way.num_rows(buffer, own, 0) for way, own in zip(self.chunks, plan.chunks, strict=True))
            plan.bounds[buffer] = list(accumulate(numbers, initial=0))
        return plan.bounds[buffer]

    def _part(self, rows: torch.Tensor, buffer: str, plan: HopPlans, chunk: int) -> torch.Tensor:
        name = base_name(buffer)
        if name == "parts":
            return rows
        begin, end = self._bounds(name, plan)[chunk : chunk + 2]
        return rows.narrow(0, begin, end - begin)

    def outbound(self, prob_dtype: torch.dtype | None) -> Layout:
        """Returns the layout of rows [R, W] on their way to the experts."""
        return self.chunks[0].outbound(prob_dtype)

    def homebound(self, prob_dtype: torch.dtype | None) -> Layout:
        """Returns the layout of rows on their way back."""
        return self.chunks[0].homebound(prob_dtype)

    def step_out(self, op: Op, rows: torch.Tensor, arrived: torch.Tensor, plan: HopPlans) -> Steps:
        """Returns the steps of an op on the way to the experts, but of the one that sorts by expert."""
        rows = self._part(rows, op.reads[0], plan, op.chunk)
        arrived = self._part(arrived, op.writes[0], plan, op.chunk)
        return self.chunks[op.chunk].step_out(op, rows, arrived, plan.chunks[op.chunk])

    def sort(self, here: AtExperts[HopPlans]) -> Steps:
        """Returns the steps that make tokens, probabilities and notes of rows as they arrived."""
        return self.chunks[here.chunk].sort(self._of_chunk(here))

    def unsort(self, here: AtExperts[HopPlans]) -> Steps:
        """Returns the steps that put outputs or gradients in the order in which their rows arrived."""
        return self.chunks[here.chunk].unsort(self._of_chunk(here))

    def _of_chunk(self, here: AtExperts[HopPlans]) -> AtExperts[HopPlan]:
        rows = self._part(here.rows, "unsorted", here.plan, here.chunk)
        return replace(here, rows=rows, plan=here.plan.chunks[here.chunk], chunk=0)

    def step_back(
        self, op: Op, reads: Sequence[torch.Tensor], written: torch.Tensor, plan: HopPlans, layout: Layout
    ) -> Steps:
        """Returns the steps of an op on the way back, but of the one that sorts by source."""
        reads = [self._part(rows, name, plan, op.chunk) for rows, name in zip(reads, op.reads, strict=True)]
        written = self._part(written, op.writes[0], plan, op.chunk)
        return self.chunks[op.chunk].step_back(op, reads, written, plan.chunks[op.chunk], layout)
