"""Tokens of samples that move, once over every link: hops to their experts, and back to the samples' new ranks.

    to_experts     copies -> all-to-all for each level, from where the samples are (hop_way.py)
    to_new_homes   all-to-all -> sums for each level, as if tokens had come from where the samples go

Where experts are cut, what has arrived is gathered over expert-TP; all shards then have the rows of the same tokens,
and each gets the sums of those whose samples go to ranks of its own all-to-alls.

A chunk is a stretch of the sequence of all samples: wherever a sample goes, its tokens stay in their chunks. What the
ranks on the way back cannot know is whose a row is, nor which rows are to be summed: each has a key behind it, its
token's place among those of all ranks in the order in which rows of a dispatch from there would arrive.

A sample's counts are those of DomainTables.plan, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from megatron_moe_opt.kernels import LANE_BYTES, row_map_from_sources
from megatron_moe_opt.kernels.streams import to_device
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange, run_to_experts, run_to_sources, to_experts
from megatron_moe_opt.runtime.rows.hop_plan import HopPlan
from megatron_moe_opt.runtime.rows.hop_way import Hops
from megatron_moe_opt.runtime.rows.linear import linear
from megatron_moe_opt.runtime.rows.own_rows import OwnRows, TokensWithFacts
from megatron_moe_opt.runtime.rows.row_facts import RowFacts, experts_of_tokens
from megatron_moe_opt.runtime.rows.row_layout import AtExperts, Layout, Payload
from megatron_moe_opt.runtime.rows.sample_counts import SampleCounts
from megatron_moe_opt.runtime.rows.sample_rows import MovingRows, check_tokens_have_rows
from megatron_moe_opt.runtime.rows.token_hops import TokenHops
from megatron_moe_opt.schedules import netmoe
from megatron_moe_opt.schedules.hops import HopStages, level_of
from megatron_moe_opt.schedules.pipeline import base_name
from megatron_moe_opt.schedules.schedule import Kind, MovingSchedule, Op
from megatron_moe_opt.topology.domain_groups import DomainGroups

_RANK_BITS = 32  # of a note: the rank that a token comes from, above its number there


class HoppingSamples(MovingRows):
    """One row a token, over the levels of the network."""

    def __init__(
        self, hops: TokenHops, routing_map: torch.Tensor, shape: tuple[int, int], num_chunks: int, apart: bool = False
    ) -> None:
        """
        Args:
            routing_map: bool [S * B, E].
            shape: tokens of a sample on this rank, and its samples.
            apart: the residual is not in the rows.
        """
        self._hops, self._shape, self._num_chunks, self._apart = hops, shape, num_chunks, apart
        self._experts = experts_of_tokens(routing_map, hops.topk)
        self._stretches = stretches(shape[0], num_chunks)
        self.counts = hops.on_device(routing_map.device).count_samples(
            self._experts, routing_map, self._stretches, shape[1]
        )
        check_tokens_have_rows(self._experts[:, 0] < hops.num_experts)
        self._facts: RowFacts | None = None
        self._own: OwnRows | None = None
        self._chunks: list[ChunkOut] = []
        self._residual: torch.Tensor | None = None

    def pack(self, tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Packs this rank's tokens [T, H] and their probabilities into rows."""
        self._facts = RowFacts(Payload.of(tokens, self._hops.wire), self._hops.topk, probs.dtype, has_notes=True)
        numbers = torch.arange(len(tokens), device=tokens.device)
        notes = numbers + (self._hops.experts.joint.rank() << _RANK_BITS)
        self._own = OwnRows(TokensWithFacts(self._facts, self._experts, notes))
        return self._own.pack(tokens, self._hops.probs_of(probs, self._experts))

    def row_bytes(self) -> tuple[int, int]:
        """Returns the bytes of a packed row in dispatch, and in combine."""
        return self._facts.outbound().row_bytes, KeyLayout(self._facts.payload).row_bytes

    def to_experts(
        self, packed: torch.Tensor, counts: SampleCounts, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens at their experts [N, H], rows per local expert (CPU) and probabilities [N]."""
        hops, device = self._hops, packed.device
        plans = hops.plan(counts.rows.unflatten(3, (self._num_chunks, -1)))
        of_experts = torch.stack([plan.tokens_per_expert for plan in plans])  # [chunks, experts held here]
        behind = (of_experts.sum(0).cumsum(0) - of_experts.sum(0)) + (of_experts.cumsum(0) - of_experts)
        behind = to_device(behind, device)  # where each chunk's rows of each expert begin
        self._chunks = [
            ChunkOut(
                hops.groups,
                hops.on_device(device),
                self._facts,
                stretch * self._shape[1],
                hops.experts.etp,
                first=first,
            )
            for stretch, first in zip(self._stretches, behind, strict=True)
        ]
        exchange = Exchange(HopsInChunks(self._chunks), HopPlans(plans, sum(plan.num_gathered for plan in plans)))
        tokens, probs = to_experts(packed, self._own.wire, exchange, prob_dtype)
        self._residual = None if self._apart else tokens
        return tokens, of_experts.sum(0), probs

    def to_new_homes(
        self, rows: torch.Tensor, counts: SampleCounts, items: torch.Tensor, beside: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the sums of each token's outputs, at the new home of its sample."""
        number = len(rows)
        if self._residual is not None and self._hops.experts.etp_rank == 0:  # in the sum over all shards once
            first = torch.zeros(number, dtype=rows.dtype, device=rows.device)
            for chunk in self._chunks:
                first[chunk.places] = (chunk.pairs % self._hops.topk == 0).to(first.dtype)
            rows = torch.addcmul(rows, self._residual, first.unsqueeze(1))
        self._residual = None
        if beside is not None:
            rows = torch.cat([rows, beside.reshape(-1, rows.size(1))])
        homes = NewHomes(self._hops, counts, items, rows.device)
        plans = homes.plans(self._num_chunks, beside is not None)
        chunks, begin = [], 0
        for chunk, (out, plan) in enumerate(zip(self._chunks, plans, strict=True)):
            along = None if beside is None else homes.along(chunk, self._num_chunks)
            chunks.append(ChunkBack.of(out, plan, homes, begin, along, number))
            begin += out.num_tokens
        exchange, source = Exchange(HopsInChunks(chunks), HopPlans(plans, len(rows))), self._own.source
        return linear(
            rows,
            lambda rows: run_to_sources(rows.contiguous(), None, exchange),
            lambda grad: run_to_experts(source.spread(grad.contiguous()), exchange, None)[0],
        )


def stretches(sequence: int, num_chunks: int) -> list[int]:
    """Returns the number of a sample's tokens in each chunk."""
    bounds = [sequence * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]


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
    """int64 [experts held here] where its rows of each expert begin."""
    places: torch.Tensor | None = None
    """int64 [its rows of the experts held here] where each is; found with the first rows that arrive."""
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
            _scatter(layout.tokens(rows), self.held.sources, self.places, here.tokens)
            if here.probs is not None:
                here.probs[self.places] = layout.probs(rows).view(-1)[self.pairs]

        return steps.call(select)

    def unsort(self, here: AtExperts[HopPlan]) -> Steps:
        """See Way: gradients of tokens, and of probabilities behind them."""
        probs = None if here.probs is None else _taken(here.probs, self.places)
        return super().unsort(replace(here, tokens=_taken(here.tokens, self.places), probs=probs))


@dataclass
class ChunkBack(Hops):
    """A chunk on the way to the new homes of samples. Its way out, that of gradients, begins there."""

    keys: torch.Tensor | None = None
    """The keys of the rows that go back from here, int64, ascending."""
    sources: torch.Tensor | None = None
    """int64 [rows of experts, and beside them], which of those each is summed in."""
    places: torch.Tensor | None = None
    """int64 [the same], where each is among those of all chunks."""
    homes: NewHomes | None = None
    begin: int = 0
    """The first of its tokens at the new home."""

    @classmethod
    def of(
        cls, out: ChunkOut, plan: HopPlan, homes: NewHomes, begin: int, along: Along | None, number: int
    ) -> ChunkBack:
        """The chunk that has come out here.

        Args:
            along: what goes along; the rows that this rank has of it are behind the `number` rows of experts.
        """
        arrived = homes.keys(out.notes >> _RANK_BITS, out.notes & ((1 << _RANK_BITS) - 1))
        keys, places, others = arrived[out.held.sources], out.places, arrived[:0]
        if along is not None:
            keys, places, others = torch.cat([keys, along.keys]), torch.cat([places, number + along.own]), along.others
        back = cls(out.groups, out.tables, out.facts, out.num_tokens, out.etp, places=places, homes=homes, begin=begin)
        in_order, back.keys = homes.in_order(torch.cat([keys, others]), back.num_rows("unsorted", plan, 0))
        back.sources = in_order[: len(keys)]
        back.held = row_map_from_sources(back.sources, len(back.keys))
        return back

    def homebound(self, prob_dtype: torch.dtype | None) -> Layout:
        """Returns the layout of rows on their way back."""
        return KeyLayout(self.facts.payload)

    def sort(self, here: AtExperts[HopPlan]) -> Steps:
        """See Way: the gradient of each sum, to all that was summed."""
        rows, layout = here.rows, here.layout
        return steps.call(lambda: _scatter(layout.tokens(rows), self.sources, self.places, here.tokens))

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
        """See Way. The first way back finds by the keys which rows are to be summed."""
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
    """A row with a key behind it, but for where rows come home."""

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload, payload.wire.combine, LANE_BYTES)

    @property
    def at_source(self) -> Layout:
        """Returns the layout that rows have at their source."""
        return self.at_experts

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the keys of rows [R, width], int64 [R]."""
        return self.of_lane(rows, 0, 8).contiguous().view(torch.int64).view(-1)

    def write_keys(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        """keys int64 [R] -> the lanes of rows [R, width]."""
        self.of_lane(rows, 0, 8).copy_(keys.view(torch.uint8).view(-1, 8))


@dataclass(frozen=True)
class Along:
    """Rows that go along with a chunk from where its tokens are now."""

    own: torch.Tensor
    """int64 [tokens of this rank], their numbers."""
    keys: torch.Tensor
    """int64 [the same], their keys."""
    others: torch.Tensor
    """int64 [tokens of the other ranks of expert-TP], theirs: in the sums over it, all have the same rows."""


class NewHomes:
    """Where each token of each rank goes, and in which order tokens arrive from there: by the rank of expert-TP first.

    Ranks are those of the joint group.
    """

    def __init__(self, hops: TokenHops, counts: SampleCounts, items: torch.Tensor, device: torch.device) -> None:
        """
        Args:
            items: see SampleHolders.items.
        """
        self._hops, self._counts, self._items, self._device = hops, counts, items, device
        ep_size, etp_size, batch = counts.parts.shape
        self._room = max(int(counts.parts.sum(2).max()), 1)
        self._space = ep_size * etp_size * self._room
        place = (hops.tables.arrival_order.unsqueeze(1) + torch.arange(etp_size) * ep_size).flatten()
        move = torch.stack([place[items // batch], items % batch]).view(2, -1, batch)
        self._place, self._move = to_device(place, device), to_device(move, device)

    def plans(self, num_chunks: int, with_beside: bool) -> tuple[HopPlan, ...]:
        """Returns the plans of a dispatch from there, chunk by chunk.

        Args:
            with_beside: each token has a row on its rank, too.
        """
        tables, parts = self._hops.tables, self._counts.parts
        counts = self._counts.rows.unflatten(3, (num_chunks, -1))  # [ep, etp, B, chunk, count]
        if with_beside:
            counts = counts.clone()
            ends = parts.unsqueeze(3) * torch.arange(num_chunks + 1) // num_chunks
            for level, first in zip(tables.levels, tables.columns, strict=False):
                counts[torch.arange(len(counts)), ..., first + tables.region(level)] = ends.diff(dim=3)
        moved = torch.empty_like(counts.flatten(0, 2))
        moved[self._items] = counts.flatten(0, 2)
        return self._hops.plan(moved.view_as(counts))

    def along(self, chunk: int, num_chunks: int) -> Along:
        """Returns the tokens of a chunk of this rank, and of the others of expert-TP."""
        experts, keys = self._hops.experts, []
        for shard, parts in enumerate(self._counts.parts[experts.ep_rank]):
            samples, sequence = int((parts > 0).sum()), int(parts.max())
            bounds = (sequence * end // num_chunks * samples for end in (chunk, chunk + 1))
            numbers = torch.arange(*bounds, device=self._device)
            if shard == experts.etp_rank:
                own = numbers
            keys.append(self.keys(torch.full_like(numbers, experts.ep_rank * experts.etp_size + shard), numbers))
        of_own = keys.pop(experts.etp_rank)
        return Along(own, of_own, torch.cat([of_own[:0], *keys]))

    def keys(self, ranks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """int64 [R] of tokens, by the rank on which they were, and their number there."""
        if not self._counts.equal:  # all stay
            return self._place[ranks] * self._room + numbers
        batch = self._move.size(2)
        place, slot = self._move[:, ranks, numbers % batch]
        return place * self._room + numbers // batch * batch + slot

    def tokens(self, keys: torch.Tensor) -> torch.Tensor:
        """Returns the number that each key's token has at home."""
        return keys % self._room

    def in_order(self, keys: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the place of each of `keys` among the `number` different ones, and these, ascending."""
        seen = torch.zeros(self._space, dtype=torch.bool, device=keys.device)
        seen[keys] = True
        places = (seen.cumsum(0) - 1)[keys]
        distinct = keys.new_empty(number)
        distinct[places] = keys
        return places, distinct


def _scatter(rows: torch.Tensor, sources: torch.Tensor, places: torch.Tensor, written: torch.Tensor) -> None:
    """written[places] = rows[sources]; `places` ascend where they are all there are."""
    if len(places) == len(written):
        torch.index_select(rows, 0, sources, out=written)
    else:
        written.index_copy_(0, places, rows.index_select(0, sources))


def _taken(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns rows[places]; `places` ascend where they are all there are, as in `_scatter`."""
    return rows if len(places) == len(rows) else rows.index_select(0, places)
