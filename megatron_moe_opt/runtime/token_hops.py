"""Tokens to the domains of their experts and back, level by level: differentiable functions around the executor.

    to_experts    for each level, outermost first: copies -> all-to-all; then a row for each expert held here
    to_tokens     sum over the experts held here; then for each level, innermost first: all-to-all -> sum of the copies

A token crosses a link once however many of its experts are behind it, and one sum comes back (HybridEP's multi-hop
all-to-all; the paper sends a row for every expert). The backward pass of each function runs the other's moves on
gradients. Sums are taken in float32 in the order of destinations, and rounded once a hop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_moe_opt.kernels import RowMap, build_row_map, empty, sum_packed_rows
from megatron_moe_opt.runtime import steps
from megatron_moe_opt.runtime.communication_lane import advance_lanes
from megatron_moe_opt.runtime.executor import executor
from megatron_moe_opt.runtime.hop_plan import DomainTables, HopPlan
from megatron_moe_opt.runtime.row_facts import RowFacts
from megatron_moe_opt.schedules.expert_migration import hop_back, hop_out
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
        copies = [_present(region[experts], number).sum(0) for region, number in self.regions]
        return torch.cat([*copies, expert_counts])


def _present(numbers: torch.Tensor, none: int) -> torch.Tensor:
    """bool [T, none]: whether a row of `numbers`, int64 [T, K], has each number below `none`."""
    present = torch.zeros(numbers.size(0), none + 1, dtype=torch.bool, device=numbers.device)
    return present.scatter_(1, numbers, True)[:, :none]


@dataclass
class Route:
    """One forward pass of a layer: who gets how many rows, and, once tokens are on their way, which."""

    groups: DomainGroups
    tables: DeviceTables
    levels: tuple[int, ...]
    """Those at which tokens hop."""
    plan: HopPlan
    facts: RowFacts
    copies: list[RowMap] = field(default_factory=list)
    """Of each hop, the copies of each row: by destination."""
    held: RowMap | None = None
    """Of the rows that arrived, the rows of each expert held here."""
    pairs: torch.Tensor | None = None
    """int64 [rows of the experts held here]: row that arrived * K + place among its facts."""


def to_experts(
    tokens: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor, route: Route
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends tokens to the ranks that hold their experts. Differentiable in tokens and probs.

    Args:
        tokens: [T, H].
        probs: [T, K], in the order of `experts`.
        experts: int64 [T, K]; E is no expert.
        route: of this pass; it learns which rows went where.

    Returns:
        A row for every expert held here that a token wants, by owner and expert [R, H], and probabilities [R].
    """
    return _ToExperts.apply(tokens, probs, experts, route)


def to_tokens(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Sums each token's expert outputs, on the way and at its rank. Differentiable.

    Args:
        rows: [R, H], in the order of `to_experts`.
        route: that `to_experts` was given.

    Returns:
        [T, H]; zero for a token without experts.
    """
    return _ToTokens.apply(rows, route)


class _ToExperts(Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor, route: Route
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.route, facts = route, route.facts
        packed = facts.pack(tokens, probs, experts.int())
        for hop, table in enumerate(route.tables.next_domain):
            counts = route.plan.hops[hop]
            wanted = _present(table[experts], len(counts.sent))
            route.copies.append(build_row_map(wanted, num_out_tokens=sum(counts.sent)))
            packed = _hop_out(packed, route, hop)
            experts = facts.experts(packed)
        _find_held(experts, route)
        return _select(facts.tokens(packed), route.held.sources), facts.probs(packed).view(-1)[route.pairs]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: torch.Tensor, grad_probs: torch.Tensor) -> tuple[Any, ...]:
        route, facts = ctx.route, ctx.route.facts
        advance_lanes()
        rows = sum_packed_rows(grad_tokens.contiguous(), facts.hidden, route.held)
        probs = grad_probs.new_zeros(rows.size(0) * facts.topk)
        probs[route.pairs] = grad_probs
        for hop in reversed(range(len(route.copies))):
            row_map = route.copies[hop]
            copies, rows = _hop_back(facts.pack(rows, probs.view(-1, facts.topk)), route, hop)
            # A probability has gone on with one copy only; the others' gradients of it are zero.
            probs = grad_probs.new_zeros(row_map.num_tokens, facts.topk)
            probs.index_add_(0, row_map.sources, facts.probs(copies))
        return rows, probs.view(-1, facts.topk), None, None


class _ToTokens(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        advance_lanes()  # experts of later layers: they have had the time of this layer's
        rows = sum_packed_rows(rows.contiguous(), route.facts.hidden, route.held)
        for hop in reversed(range(len(route.copies))):
            _, rows = _hop_back(rows, route, hop)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad, route = grad.contiguous(), ctx.route
        for hop in range(len(route.copies)):
            grad = _hop_out(grad, route, hop)
        return _select(grad, route.held.sources), None


def _find_held(experts: torch.Tensor, route: Route) -> None:
    """Notes which rows that arrived, with `experts` int64 [R, K], go to which of the experts held here."""
    tables, per_expert = route.tables, route.plan.tokens_per_expert
    topk, device, num_rows = experts.size(1), experts.device, int(per_expert.sum())
    places, held = tables.place_in_domain[experts], per_expert.numel()
    route.held = build_row_map(_present(places, held), num_out_tokens=num_rows)
    fact = torch.zeros(experts.size(0), held + 1, dtype=torch.int64, device=device)
    fact.scatter_(1, places, torch.arange(topk, device=device).expand(experts.shape))
    numbers = torch.arange(held, device=device)
    expert = numbers.repeat_interleave(route.held.expert_counts, output_size=num_rows)
    sources = route.held.sources
    route.pairs = sources * topk + fact[sources, expert]


def _hop_out(rows: torch.Tensor, route: Route, hop: int) -> torch.Tensor:
    """Copies of rows [R, W] to the domains of a level; the rows that arrive [R', W]."""
    counts, sources, level = route.plan.hops[hop], route.copies[hop].sources, route.levels[hop]
    copies = empty((sources.numel(), rows.size(1)), rows.dtype, rows.device)
    arrived = empty((sum(counts.received), rows.size(1)), rows.dtype, rows.device)
    schedule = hop_out(level, route.groups.domains.levels, copies.nbytes)
    group = route.groups.tokens[level]
    bound = [
        steps.call(lambda: torch.index_select(rows, 0, sources, out=copies)),
        steps.all_to_all(copies, counts.sent, arrived, counts.received, group),
    ]
    executor(rows.device).run(schedule, bound)
    return arrived


def _hop_back(arrived: torch.Tensor, route: Route, hop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What became of the rows that arrived in a hop [R', W] to where they came from: copies, and their sum [R, H]."""
    counts, row_map, level = route.plan.hops[hop], route.copies[hop], route.levels[hop]
    copies = empty((row_map.num_rows, arrived.size(1)), arrived.dtype, arrived.device)
    schedule = hop_back(level, route.groups.domains.levels, copies.nbytes)
    group, summed = route.groups.tokens[level], []
    bound = [
        steps.all_to_all(arrived, counts.received, copies, counts.sent, group),
        steps.call(lambda: summed.append(sum_packed_rows(copies, route.facts.hidden, row_map))),
    ]
    executor(arrived.device).run(schedule, bound)
    return copies, summed[0]


def _select(rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """rows[sources] in memory of the pool."""
    selected = empty((sources.numel(), rows.size(1)), rows.dtype, rows.device)
    return torch.index_select(rows, 0, sources, out=selected)
