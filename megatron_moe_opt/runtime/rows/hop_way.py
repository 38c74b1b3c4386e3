"""Hops as a way of rows: copies to the domains of their experts, level by level, and the sums that come back.

Sums are taken in float32 in the order of destinations, and rounded once a hop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

import torch

from megatron_moe_opt.kernels import RowMap, build_row_map, sum_packed_rows
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.rows.hop_plan import DomainTables, HopCounts, HopPlan
from megatron_moe_opt.runtime.rows.row_facts import RowFacts
from megatron_moe_opt.schedules.expert_migration import hop_back, hop_out
from megatron_moe_opt.schedules.schedule import Op, Schedule
from megatron_moe_opt.topology.domain_groups import DomainGroups


class DeviceTables:
    """What rows are looked up in, where the rows are; see DomainTables."""

    def __init__(self, tables: DomainTables, device: torch.device) -> None:
        self.regions = [(tables.region_of_experts(level).to(device), tables.num_regions(level))
                        for level in tables.levels]  # fmt: skip
        self.next_domain = [tables.next_domain(level).to(device) for level in tables.levels]
        self.place_in_domain = tables.place_in_domain.to(device)

    def count(self, experts: torch.Tensor, expert_counts: torch.Tensor) -> torch.Tensor:
        """This rank's row of the counts that `DomainTables.plan` takes: int64 [num_counts].

        Args:
            experts: int64 [T, K] of this rank's tokens.
            expert_counts: int64 [E] rows of each expert.
        """
        copies = [present(region[experts], number).sum(0) for region, number in self.regions]
        return torch.cat([*copies, expert_counts])


def present(numbers: torch.Tensor, none: int) -> torch.Tensor:
    """bool [T, none]: whether a row of `numbers`, int64 [T, K], has each number below `none`."""
    present = torch.zeros(numbers.size(0), none + 1, dtype=torch.bool, device=numbers.device)
    return present.scatter_(1, numbers, True)[:, :none]


@dataclass
class Hops:
    """HybridEP's way: a copy of a row to every domain with one of its experts, level by level; back, their sums.

    Its rows are in one chunk. One object a pass: what the first dispatch finds out about rows, the others go by. Rows
    of the buffers, L a level:

        copies_L    a row for each domain of the level that it goes to, there and back
        arrived_L   what has come to this rank at the level
        rows_L      sums of what has come back to it
    """

    groups: DomainGroups
    tables: DeviceTables
    levels: tuple[int, ...]
    """Those at which tokens hop."""
    facts: RowFacts
    copies: dict[int, RowMap] = field(default_factory=dict)
    """Of the hop at each level, the copies of each row: by destination."""

    lies_in: ClassVar[Mapping[str, str]] = {}

    def dispatch(self, plan: HopPlan, row_bytes: int) -> Schedule:
        """See Way."""
        return hop_out(self._sent(plan, row_bytes), self.groups.domains.levels)

    def combine(self, plan: HopPlan, row_bytes: int) -> Schedule:
        """See Way."""
        return hop_back(dict(reversed(self._sent(plan, row_bytes).items())), self.groups.domains.levels)

    def _sent(self, plan: HopPlan, row_bytes: int) -> dict[int, int]:
        return {level: sum(self._counts(plan, level).sent) * row_bytes for level in self.levels}

    def _counts(self, plan: HopPlan, level: int) -> HopCounts:
        return plan.hops[self.levels.index(level)]

    def num_rows(self, buffer: str, plan: HopPlan, chunk: int) -> int:
        """See Way. None of the last sums, which whoever takes the sums has."""
        name, level = _name_and_level(buffer)
        if name == "rows":
            return 0 if level == self.levels[0] else self.copies[level].num_tokens
        counts = self._counts(plan, level)
        return sum(counts.sent if name == "copies" else counts.received)

    def step_out(self, op: Op, rows: torch.Tensor, arrived: torch.Tensor, plan: HopPlan) -> Steps:
        """See Way. The first pass finds the copies of each row by the facts behind it."""
        level = _name_and_level(op.writes[0])[1]
        counts = self._counts(plan, level)
        if op.group is not None:
            return steps.all_to_all(rows, counts.sent, arrived, counts.received, self.groups.tokens[level])

        def copy() -> None:
            if level not in self.copies:
                domains = self.tables.next_domain[self.levels.index(level)][self.facts.experts(rows)]
                self.copies[level] = build_row_map(present(domains, len(counts.sent)), num_out_tokens=arrived.size(0))
            torch.index_select(rows, 0, self.copies[level].sources, out=arrived)

        return steps.call(copy)

    def step_back(
        self, op: Op, reads: Sequence[torch.Tensor], written: torch.Tensor, plan: HopPlan, layout: Sums
    ) -> Steps:
        """See Way."""
        level = _name_and_level(op.writes[0])[1]
        if op.group is None:
            return steps.call(partial(layout.add, reads[0], self.copies[level], written))
        counts = self._counts(plan, level)
        return steps.all_to_all(reads[0], counts.received, written, counts.sent, self.groups.tokens[level])


def _name_and_level(buffer: str) -> tuple[str, int]:
    name, _, level = buffer.partition("_")
    return name, int(level)


class Sums(Protocol):
    """What copies that have come back are added to."""

    def add(self, copies: torch.Tensor, row_map: RowMap, written: torch.Tensor) -> None:
        """Adds the copies [N, W] of each row; the sums hop on in `written` [R, W], or are the last ones [0, W]."""


@dataclass
class TokenSums:
    """Sums of rows that are tokens alone."""

    facts: RowFacts
    tokens: torch.Tensor
    """[R, H], the last ones; before the first hop what comes back."""

    def add(self, copies: torch.Tensor, row_map: RowMap, written: torch.Tensor) -> None:
        """See Sums."""
        self.tokens = sum_packed_rows(copies, self.facts.hidden, row_map)
        if written.size(0):
            written.copy_(self.tokens)


@dataclass
class FactSums:
    """Sums of rows with the gradients of probabilities behind them, which go on with one copy alone."""

    facts: RowFacts
    tokens: torch.Tensor
    """[R, H], as in TokenSums."""
    probs: torch.Tensor
    """[R, K]."""

    def add(self, copies: torch.Tensor, row_map: RowMap, written: torch.Tensor) -> None:
        """See Sums."""
        self.tokens = sum_packed_rows(copies, self.facts.hidden, row_map)
        # A probability has gone on with one copy only; the others' gradients of it are zero.
        self.probs = self.probs.new_zeros(row_map.num_tokens, self.facts.topk)
        self.probs.index_add_(0, row_map.sources, self.facts.probs(copies))
        if written.size(0):
            self.facts.pack(self.tokens, self.probs, packed=written)
