"""Hops of a chunk of tokens back, to the new ranks of its samples.

What the ranks on the way back cannot know is whose a row is, nor which rows are to be summed: each has a key behind it
(new_homes.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_moe_opt.kernels import LANE_BYTES, row_map_from_sources
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.hops.hop_plan import HopPlan
from megatron_moe_opt.runtime.hops.hop_way import Hops
from megatron_moe_opt.runtime.moving_samples.new_homes import Along, NewHomes
from megatron_moe_opt.runtime.rows.row_layout import AtExperts, Layout, Payload
from megatron_moe_opt.schedules.groups import level_of
from megatron_moe_opt.schedules.pipeline import base_name
from megatron_moe_opt.schedules.schedule import Kind, Op

RANK_BITS = 32
"""The bits of a note that hold a token's number on the rank that it comes from; the rank is above them."""


@dataclass
class ChunkBack(Hops):
    """A chunk on the way to the new homes of samples. Its way out, that of gradients, begins there."""

    keys: torch.Tensor | None = None
    """The keys of the rows that go back from here, int64, ascending."""
    homes: NewHomes | None = None
    begin: int = 0
    """The number of its first token at the new home."""

    @classmethod
    def of(cls, out: Hops, plan: HopPlan, homes: NewHomes, begin: int, along: Along | None, number: int) -> ChunkBack:
        """Returns the way back of a chunk that has come out here.

        Args:
            along: what goes along; the rows that this rank has of it are behind the `number` rows of experts.
        """
        arrived = homes.keys(out.notes >> RANK_BITS, out.notes & ((1 << RANK_BITS) - 1))
        keys, places, others = arrived[out.held.sources], out.places, arrived[:0]
        if along is not None:
            keys, others = torch.cat([keys, along.keys]), along.others
            places = None if places is None else torch.cat([places, number + along.own])
        back = cls(out.groups, out.tables, out.facts, out.num_tokens, out.etp, places=places, homes=homes, begin=begin)
        in_order, back.keys = homes.in_order(torch.cat([keys, others]), back.num_rows("unsorted", plan, 0))
        back.held = row_map_from_sources(in_order[: len(keys)], len(back.keys))
        if places is not None:
            back.held = back.held.among(places)
        return back

    def homebound(self, prob_dtype: torch.dtype | None) -> Layout:
        """Returns the layout of rows on their way back."""
        return KeyLayout(self.facts.payload)

    def sort(self, here: AtExperts[HopPlan]) -> Steps:
        """Does what Way says: copies the gradient of each sum to all that was summed."""
        rows, layout = here.rows, here.layout
        return steps.call(lambda: layout.spread(rows, self.held, here.tokens, self.places))

    def unsort(self, here: AtExperts[HopPlan]) -> Steps:
        """Returns the steps that put outputs or gradients in the order in which their rows arrived."""
        layout = here.layout

        def add() -> None:
            layout.at_experts.sum_rows(here.tokens, self.held, here.rows, layout)
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
