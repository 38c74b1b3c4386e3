"""Hops of tokens in chunks, each chunk a way of its own: to the experts, and back to the new ranks of samples.

What the ranks on the way back cannot know is whose a row is, nor which rows are to be summed: each has a key behind it
(new_homes.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from megatron_moe_opt.kernels import LANE_BYTES, RowMap, row_map_from_sources
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.hops.hop_plan import HopPlan
from megatron_moe_opt.runtime.hops.hop_way import Hops
from megatron_moe_opt.runtime.moving_samples.new_homes import Along, NewHomes
from megatron_moe_opt.runtime.rows.row_layout import AtExperts, Layout, Payload
from megatron_moe_opt.schedules import netmoe
from megatron_moe_opt.schedules.hops import HopStages, level_of
from megatron_moe_opt.schedules.pipeline import base_name
from megatron_moe_opt.schedules.schedule import Kind, MovingSchedule, Op
from megatron_moe_opt.topology.domain_groups import DomainGroups

RANK_BITS = 32
"""The bits of a note that hold a token's number on the rank that it comes from; the rank is above them."""


@dataclass(frozen=True)
class HopPlans:
    """The plans of hops of all chunks."""

    chunks: tuple[HopPlan, ...]
    num_gathered: int
    """Rows of the experts held here, of all chunks."""

    arrives_sorted: ClassVar[bool] = False


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
        return self._moving("dispatch", plan, row_bytes)

    def combine(self, plan: HopPlans, row_bytes: int) -> MovingSchedule:
        """Returns the schedule of rows back to their sources."""
        return self._moving("combine", plan, row_bytes)

    def _moving(self, direction: str, plan: HopPlans, row_bytes: int) -> MovingSchedule:
        one = self.stages
        return netmoe.outline(direction, len(self.chunks), one.levels, one.hops, one.etp_size).moving(
            lambda: [way.rows_of(own).bytes(row_bytes) for way, own in zip(self.chunks, plan.chunks, strict=True)]
        )

    def num_rows(self, buffer: str, plan: HopPlans, chunk: int) -> int:
        """Returns the rows that a buffer has to hold; of `parts`, for one chunk."""
        if buffer == "sorted":
            return plan.num_gathered
        numbers = self._numbers(buffer, plan)
        return numbers[chunk] if buffer == "parts" else sum(numbers)

    def _numbers(self, buffer: str, plan: HopPlans) -> list[int]:
        return [way.num_rows(buffer, own, 0) for way, own in zip(self.chunks, plan.chunks, strict=True)]

    def _part(self, rows: torch.Tensor, buffer: str, plan: HopPlans, chunk: int) -> torch.Tensor:
        if base_name(buffer) == "parts":
            return rows
        numbers = self._numbers(base_name(buffer), plan)
        return rows.narrow(0, sum(numbers[:chunk]), numbers[chunk])

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


@dataclass
class ChunkOut(Hops):
    """A chunk of this rank's tokens on the way to the experts, whose rows lie among those of other chunks."""

    first: torch.Tensor | None = None
    """The row at which the chunk's rows of each expert begin, int64 [experts held here]."""
    places: torch.Tensor | None = None
    """The place of each row among the held experts' rows, int64 [the chunk's rows]; found
    with the first that arrive.
    """
    notes: torch.Tensor | None = None
    """The note of each token, int64 [rows that arrived]."""

    def sort(self, here: AtExperts[HopPlan]) -> Steps:
        """Returns the steps that make tokens, probabilities and notes of rows as they arrived."""
        rows, layout = here.rows, here.layout

        def select() -> None:
            if self.held is None:
                self._find_held(layout.experts(rows), here.plan)
                counts = self.held.expert_counts
                shift = (self.first - (counts.cumsum(0) - counts)).repeat_interleave(
                    counts, output_size=self.held.num_rows
                )
                self.places = torch.arange(self.held.num_rows, device=rows.device) + shift
                self.notes = layout.notes(rows)
            _scatter(layout, rows, self.held, self.places, here.tokens)
            if here.probs is not None:
                here.probs[self.places] = layout.probs(rows).view(-1)[self.pairs]

        return steps.call(select)

    def unsort(self, here: AtExperts[HopPlan]) -> Steps:
        """Does what Way says, for gradients of tokens and of probabilities behind them."""
        probs = None if here.probs is None else _taken(here.probs, self.places)
        return super().unsort(replace(here, tokens=_taken(here.tokens, self.places), probs=probs))


@dataclass
class ChunkBack(Hops):
    """A chunk on the way to the new homes of samples. Its way out, that of gradients, begins there."""

    keys: torch.Tensor | None = None
    """The keys of the rows that go back from here, int64, ascending."""
    places: torch.Tensor | None = None
    """The place of each of these rows among those of all chunks, int64."""
    homes: NewHomes | None = None
    begin: int = 0
    """The number of its first token at the new home."""

    @classmethod
    def of(
        cls, out: ChunkOut, plan: HopPlan, homes: NewHomes, begin: int, along: Along | None, number: int
    ) -> ChunkBack:
        """Returns the way back of a chunk that has come out here.

        Args:
            along: what goes along; the rows that this rank has of it are behind the `number` rows of experts.
        """
        arrived = homes.keys(out.notes >> RANK_BITS, out.notes & ((1 << RANK_BITS) - 1))
        keys, places, others = arrived[out.held.sources], out.places, arrived[:0]
        if along is not None:
            keys, places, others = torch.cat([keys, along.keys]), torch.cat([places, number + along.own]), along.others
        back = cls(out.groups, out.tables, out.facts, out.num_tokens, out.etp, places=places, homes=homes, begin=begin)
        in_order, back.keys = homes.in_order(torch.cat([keys, others]), back.num_rows("unsorted", plan, 0))
        back.held = row_map_from_sources(in_order[: len(keys)], len(back.keys))
        return back

    def homebound(self, prob_dtype: torch.dtype | None) -> Layout:
        """Returns the layout of rows on their way back."""
        return KeyLayout(self.facts.payload)

    def sort(self, here: AtExperts[HopPlan]) -> Steps:
        """Does what Way says: copies the gradient of each sum to all that was summed."""
        rows, layout = here.rows, here.layout
        return steps.call(lambda: _scatter(layout, rows, self.held, self.places, here.tokens))

    def unsort(self, here: AtExperts[HopPlan]) -> Steps:
        """Returns the steps that put outputs or gradients in the order in which their rows arrived."""
        layout = here.layout

        def add() -> None:
            layout.at_experts.sum_rows(_taken(here.tokens, self.places), self.held, here.rows, layout)
            layout.write_keys(self.keys, here.rows)

        return steps.call(add)

    def step_back(
        self, op: Op, reads: Sequence[torch.Tensor], written: torch.Tensor, plan: HopPlan, layout: KeyLayout
    ) -> Steps:
        """Does what Way.step_back says."""
        if op.kind is Kind.SUM:
            before, mine = sum(plan.gather_counts[: self.etp.rank()]), len(written)
            own_keys = steps.call(lambda: layout.write_keys(self.keys.narrow(0, before, mine), written))
            return super().step_back(op, reads, written, plan, layout) + own_keys
        if op.group is not None:
            return super().step_back(op, reads, written, plan, layout)
        (copies,), level = reads, level_of(base_name(op.reads[0]).replace("_", "."))
        is_last = level == min(plan.hops)

        def add() -> None:
            keys = layout.keys(copies)
            if is_last:
                sources, distinct = self.homes.tokens(keys) - self.begin, None
            else:
                sources, distinct = self.homes.in_order(keys, written.size(0))
            self.copies[level] = row_map_from_sources(sources, written.size(0))
            layout.sum_rows(copies, self.copies[level], written, layout.at_source if is_last else layout)
            if not is_last:
                layout.write_keys(distinct, written)

        return steps.call(add)


class KeyLayout(Layout):
    """The layout of a row with a key behind it, which is gone where rows come home."""

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload, payload.wire.combine, LANE_BYTES)

    @property
    def at_source(self) -> Layout:
        """Returns the layout that rows have at their source."""
        return self.at_experts

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the keys of rows [R, width], int64 [R]."""
        return self.numbers_of_lane(rows, 0, 8, torch.int64).view(-1)

    def write_keys(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes keys, int64 [R], to the lanes of rows [R, width]."""
        self.of_lane(rows, 0, 8).copy_(keys.view(torch.uint8).view(-1, 8))


def _scatter(layout: Layout, rows: torch.Tensor, row_map: RowMap, places: torch.Tensor, written: torch.Tensor) -> None:
    """Copies the token of each row to its places in the map, which are written[places]; these ascend where they are all
    there are.
    """
    if len(places) == len(written):
        layout.spread(rows, row_map, written)
    else:
        written.index_copy_(0, places, layout.tokens(rows).index_select(0, row_map.sources))


def _taken(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns rows[places]; `places` ascend where they are all there are, as in `_scatter`."""
    return rows if len(places) == len(rows) else rows.index_select(0, places)
