"""Hops as a way of rows: copies to the domains of their experts, level by level, and the sums that come back.

A token crosses a link once however many of its experts are behind it, and one sum comes back (HybridEP's multi-hop
all-to-all; the paper sends a row for every expert). Sums are taken in float32, on the experts' ranks in the order of
experts and then in that of destinations, and rounded once a hop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.kernels import RowMap, build_row_map, spread_rows
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.hops.hop_plan import DomainTables, HopPlan
from megatron_moe_opt.runtime.hops.row_facts import FactLayout, RowFacts
from megatron_moe_opt.runtime.rows.row_layout import AtExperts
from megatron_moe_opt.schedules.groups import EXPERT_TP, TP, level_of
from megatron_moe_opt.schedules.hops import HopRows, HopStages, outline
from megatron_moe_opt.schedules.pipeline import base_name
from megatron_moe_opt.schedules.schedule import Kind, MovingSchedule, Op
from megatron_moe_opt.topology.domain_groups import DomainGroups


class DeviceTables:
    """The tables of DomainTables on the device of the rows, which are looked up in them."""

    def __init__(self, tables: DomainTables, device: torch.device) -> None:
        self.regions = [(tables.region_of_experts(level).to(device), tables.num_regions(level))
                        for level in tables.levels]  # fmt: skip
        self.next_domain = {level: tables.next_domain(level).to(device) for level in tables.levels}
        self.place_in_domain = tables.place_in_domain.to(device)

    def count(self, experts: torch.Tensor, routing_map: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
        """Returns this rank's row of the counts that `DomainTables.plan` takes, for each part of its tokens, and how
        many tokens that has: int64 [parts * (num_counts + 1)].

        Args:
            experts: int64 [T, K] of this rank's tokens.
            routing_map: bool [T, E], which says the same.
            parts: tokens of each part, one after another.
        """
        copies = [present(region[experts], number) for region, number in self.regions]
        every = torch.ones_like(routing_map[:, :1])
        of_parts = zip(*(one.split(parts) for one in (*copies, routing_map, every)), strict=True)
        return torch.cat([counted.sum(0) for of_part in of_parts for counted in of_part])

    def count_samples(
        self, experts: torch.Tensor, routing_map: torch.Tensor, stretches: Sequence[int], num_samples: int
    ) -> torch.Tensor:
        """Counts what `count` counts, but for each sample, where parts are stretches of the sequence: int64 [B, parts *
        num_counts].

        Args:
            experts, routing_map: as `count` takes them; token s of sample b is row s * B + b.
            stretches: tokens of a sample in each part.
        """
        copies = [present(region[experts], number) for region, number in self.regions]
        by_sample = (one.view(-1, num_samples, one.size(1)).split(stretches) for one in (*copies, routing_map))
        of_parts = zip(*by_sample, strict=True)
        return torch.cat([counted.sum(0) for of_part in of_parts for counted in of_part], dim=1)


def present(numbers: torch.Tensor, none: int) -> torch.Tensor:
    """Returns whether a row of `numbers`, int64 [T, K], has each number below `none`: bool [T, none]."""
    present = torch.zeros(numbers.size(0), none + 1, dtype=torch.bool, device=numbers.device)
    return present.scatter_(1, numbers, True)[:, :none]


@dataclass
class Hops:
    """HybridEP's way: level by level, a row is copied to every domain that has one of its experts. On the way back the
    results of its copies are summed at each level.

    Its rows are tokens with their facts, in one chunk, beside others or not (hops_in_chunks.py). One object serves all
    exchanges of the same tokens: the first way out finds which copies each row has, and the others use them. Rows of
    the buffers, at level L (schedules/hops.py):

        rows                 this rank's tokens
        copies_L, returned_L a row for each domain of the level that it goes to, there and back
        arrived_L            what has come to this rank at the level
        gathered             what has come to all ranks of expert-TP
        sorted               a row for each expert held here that a token wants
        unsorted             sums over the experts held here, in the place of what was gathered, or arrived last
        parts, summed        what other shards have for a sum here, and the sums in the place of what arrived last
        summed_L             sums of what has come back, in the place of what was copied at the level
        own                  those of this rank's tokens, where others have shares of the same, which it gets back too
    """

    groups: DomainGroups
    tables: DeviceTables
    facts: RowFacts
    num_tokens: int
    """The number of this rank's tokens."""
    etp: ProcessGroup | None = None
    """The expert-TP group, of one rank where experts are whole; None: there is none."""
    tp: ProcessGroup | None = None
    """The group whose ranks have shared out these tokens, and get back all of them; None: they are this rank's own."""
    first: torch.Tensor | None = None
    """Where its rows of each expert held here begin among those of all chunks, int64; None: there is one chunk."""
    copies: dict[int, RowMap] = field(default_factory=dict)
    """The copies of each row in the hop at each level: by destination."""
    held: RowMap | None = None
    """The rows of each expert held here, of each row that arrived; numbered among those of all chunks."""
    places: torch.Tensor | None = None
    """The place of each of these rows among those of all chunks, int64; None: there is one chunk."""
    pairs: torch.Tensor | None = None
    """The pair that each row of the experts held here is, int64: row that arrived * K + place among its facts."""
    notes: torch.Tensor | None = None
    """The note of each row that arrived, int64; None: they have none."""

    lies_in: ClassVar[Mapping[str, str]] = HopStages.lies_in

    @property
    def stages(self) -> HopStages:
        """Returns the stages of one partition in a pipeline with the experts."""
        domains, (etp_size, tp_size) = self.groups.domains, map(_size, (self.etp, self.tp))
        return HopStages(domains.levels, domains.hops, True, etp_size, tp_size)

    def dispatch(self, plan: HopPlan, row_bytes: int) -> MovingSchedule:
        """Returns the schedule of rows to their experts."""
        return outline("hop out", self.stages).moving(lambda: [self.rows_of(plan).bytes(row_bytes)])

    def combine(self, plan: HopPlan, row_bytes: int) -> MovingSchedule:
        """Returns the schedule of rows back to their sources."""
        return outline("hop back", self.stages).moving(lambda: [self.rows_of(plan).bytes(row_bytes)])

    def rows_of(self, plan: HopPlan) -> HopRows:
        """Returns the rows of a plan, as the stages take them."""
        sent = {level: sum(hop.sent) for level, hop in plan.hops.items()}
        tp_size, tp_rank = _size(self.tp), 0 if self.tp is None else self.tp.rank()
        return HopRows(self.num_tokens, sent, plan.num_gathered, sum(plan.gather_counts), tp_size, tp_rank)

    def num_rows(self, buffer: str, plan: HopPlan, chunk: int) -> int:
        """Returns the rows that a buffer has to hold; of `parts`, for one chunk."""
        name, _, level = buffer.partition("_")
        if name == "sorted":
            return plan.num_gathered
        if name in ("copies", "returned"):
            return sum(plan.hops[int(level)].sent)
        if name == "arrived":
            return sum(plan.hops[int(level)].received)
        arrived = plan.arrived(self.num_tokens)
        if name == "parts":
            return (len(plan.gather_counts) - 1) * arrived
        if name in ("gathered", "unsorted") and plan.gather_counts:
            return sum(plan.gather_counts)
        if name == "summed" and level:
            before = [sum(hop.received) for one, hop in plan.hops.items() if one < int(level)]
            return before[-1] if before else self.num_tokens
        return self.num_tokens if name == "rows" else arrived

    def outbound(self, prob_dtype: torch.dtype | None) -> FactLayout:
        """Returns what Way.outbound says."""
        return self.facts.outbound(prob_dtype is not None)

    def homebound(self, prob_dtype: torch.dtype | None) -> FactLayout:
        """Returns the layout of rows on their way back."""
        return self.facts.homebound(prob_dtype is not None)

    def step_out(self, op: Op, rows: torch.Tensor, arrived: torch.Tensor, plan: HopPlan) -> Steps:
        """Does what Way.step_out says."""
        if op.group == EXPERT_TP:
            return steps.all_gather(rows, arrived, plan.gather_counts, self.etp)
        if op.group is not None:
            level = level_of(op.group)
            counts = plan.hops[level]
            return steps.all_to_all(rows, counts.sent, arrived, counts.received, self.groups.tokens[level])
        level = _level(op.writes[0])

        def copy() -> None:
            if level not in self.copies:
                domains = self.tables.next_domain[level][self.facts.outbound().experts(rows)]
                number = len(plan.hops[level].sent)
                self.copies[level] = build_row_map(present(domains, number), num_out_tokens=arrived.size(0))
            spread_rows(rows, self.copies[level], arrived)

        return steps.call(copy)

    def sort(self, here: AtExperts[HopPlan]) -> Steps:
        """Does what Way.sort says."""
        rows, layout = here.rows, here.layout

        def select() -> None:
            if self.held is None:
                self._find_held(layout.experts(rows), here.plan)
                if self.facts.has_notes:
                    self.notes = layout.notes(rows)
            layout.spread(rows, self.held, here.tokens, self.places)
            if here.probs is None:
                return
            of_facts = layout.probs(rows).view(-1)
            if self.places is None:
                torch.index_select(of_facts, 0, self.pairs, out=here.probs)
            else:
                here.probs[self.places] = of_facts[self.pairs]

        return steps.call(select)

    def unsort(self, here: AtExperts[HopPlan]) -> Steps:
        """Returns the steps that put outputs or gradients in the order in which their rows arrived."""
        tokens, probs, layout = here.tokens, here.probs, here.layout
        target = layout if here.plan.hops or _size(self.etp) > 1 else layout.at_source

        def add() -> None:
            layout.at_experts.sum_rows(tokens, self.held, here.rows, target)
            if probs is not None:
                of_facts = probs.new_zeros(here.rows.size(0), self.facts.topk)
                of_facts.view(-1)[self.pairs] = probs if self.places is None else probs[self.places]
                target.write_facts(here.rows, of_facts)

        return steps.call(add)

    def step_back(
        self, op: Op, reads: Sequence[torch.Tensor], written: torch.Tensor, plan: HopPlan, layout: FactLayout
    ) -> Steps:
        """Returns the steps of an op on the way back, but of the one that sorts by source."""
        source = reads[0]
        if op.group == TP:
            return steps.all_gather(source, written, [self.num_tokens] * self.tp.size(), self.tp)
        if op.group == EXPERT_TP:
            return steps.scatter(source, written, plan.gather_counts, self.etp)
        if op.kind is Kind.SUM:
            parts, of_peers = reads
            target = layout if plan.hops else layout.at_source
            is_same = target.wire is layout.wire
            summed = written if is_same else layout.empty_rows(written.size(0), written)
            step = steps.sum_scattered(of_peers, parts, summed, plan.gather_counts, self.etp, layout.columns)
            return step if is_same else step + steps.call(lambda: target.take(layout, summed, written))
        if op.group is not None:
            level = level_of(op.group)
            counts = plan.hops[level]
            return steps.all_to_all(source, counts.received, written, counts.sent, self.groups.tokens[level])
        level = _level(op.reads[0])
        target = layout.at_source if level == min(plan.hops) else layout

        def add() -> None:
            row_map = self.copies[level]
            layout.sum_rows(source, row_map, written, target)
            if layout.has_probs:
                # A probability has gone on with one copy only; the others' gradients of it are zero.
                probs = layout.probs(source)
                of_facts = probs.new_zeros(written.size(0), probs.size(1))
                of_facts.index_add_(0, row_map.sources, probs)
                target.write_facts(written, of_facts)

        return steps.call(add)

    def _find_held(self, experts: torch.Tensor, plan: HopPlan) -> None:
        """Notes which rows that arrived, with `experts` int64 [N, K], go to which of the experts held here."""
        topk, device, num_rows = experts.size(1), experts.device, plan.num_gathered
        places, held = self.tables.place_in_domain[experts], plan.tokens_per_expert.numel()
        self.held = build_row_map(present(places, held), num_out_tokens=num_rows)
        fact = torch.zeros(experts.size(0), held + 1, dtype=torch.int64, device=device)
        fact.scatter_(1, places, torch.arange(topk, device=device).expand(experts.shape))
        numbers = torch.arange(held, device=device)
        expert = numbers.repeat_interleave(self.held.expert_counts, output_size=num_rows)
        sources = self.held.sources
        self.pairs = sources * topk + fact[sources, expert]
        if self.first is not None:
            counts = self.held.expert_counts
            ahead = (self.first - (counts.cumsum(0) - counts)).repeat_interleave(counts, output_size=num_rows)
            self.places = torch.arange(num_rows, device=device) + ahead
            self.held = self.held.among(self.places)


def _size(group: ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _level(buffer: str) -> int:
    return int(base_name(buffer).rpartition("_")[2])
