"""Tokens to the domains of their experts and back, level by level: differentiable functions around the executor.

    to_experts    for each level, outermost first: copies -> all-to-all; then a row for each expert held here
    to_tokens     sum over the experts held here; then for each level, innermost first: all-to-all -> sum of the copies

A token crosses a link once however many of its experts are behind it, and one sum comes back (HybridEP's multi-hop
all-to-all; the paper sends a row for every expert). The backward pass of each function runs the other's moves on
gradients. Sums are taken in float32 in the order of destinations, and rounded once a hop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_moe_opt.kernels import RowMap, build_row_map, empty, sum_packed_rows
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.engine.started import advance_started
from megatron_moe_opt.runtime.rows.hop_plan import DomainTables, HopPlan
from megatron_moe_opt.runtime.rows.linear import linear
from megatron_moe_opt.runtime.rows.row_facts import RowFacts
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

    def there(rows: torch.Tensor) -> torch.Tensor:
        advance_started()  # experts of later layers: they have had the time of this layer's
        rows = sum_packed_rows(rows.contiguous(), route.facts.hidden, route.held)

        def add(copies: torch.Tensor, row_map: RowMap, summed: torch.Tensor | None) -> None:
            nonlocal rows
            rows = sum_packed_rows(copies, route.facts.hidden, row_map)
            if summed is not None:
                summed.copy_(rows)

        _hop_back(rows, route, add)
        return rows

    return linear(rows, there, lambda grad: _select(_hop_out(grad.contiguous(), route), route.held.sources))


class _ToExperts(Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor, route: Route
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.route, facts = route, route.facts
        packed = _hop_out(facts.pack(tokens, probs, experts.int()), route)
        _find_held(facts.experts(packed), route)
        return _select(facts.tokens(packed), route.held.sources), facts.probs(packed).view(-1)[route.pairs]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: torch.Tensor, grad_probs: torch.Tensor) -> tuple[Any, ...]:
        route, facts = ctx.route, ctx.route.facts
        advance_started()
        rows = sum_packed_rows(grad_tokens.contiguous(), facts.hidden, route.held)
        probs = grad_probs.new_zeros(rows.size(0) * facts.topk)
        probs[route.pairs] = grad_probs
        probs = probs.view(-1, facts.topk)

        def add(copies: torch.Tensor, row_map: RowMap, summed: torch.Tensor | None) -> None:
            nonlocal rows, probs
            rows = sum_packed_rows(copies, facts.hidden, row_map)
            # A probability has gone on with one copy only; the others' gradients of it are zero.
            probs = grad_probs.new_zeros(row_map.num_tokens, facts.topk)
            probs.index_add_(0, row_map.sources, facts.probs(copies))
            if summed is not None:
                facts.pack(rows, probs, packed=summed)

        if route.levels:
            _hop_back(facts.pack(rows, probs), route, add)
        return rows, probs, None, None


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


def _hop_out(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Copies of rows [R, W] to the domains of each level in turn; the rows that arrive here in the end [N, W].

    The first pass of a route finds the copies of each row by the facts behind it.
    """

    def copy(hop: int, rows: torch.Tensor, copies: torch.Tensor) -> None:
        if hop == len(route.copies):
            experts, number = route.tables.next_domain[hop][route.facts.experts(rows)], len(route.plan.hops[hop].sent)
            route.copies.append(build_row_map(_present(experts, number), num_out_tokens=copies.size(0)))
        torch.index_select(rows, 0, route.copies[hop].sources, out=copies)

    bound, sent, like = [], {}, rows
    for hop, (level, counts) in enumerate(zip(route.levels, route.plan.hops, strict=True)):
        copies, arrived = _empty(sum(counts.sent), like), _empty(sum(counts.received), like)
        bound.append(steps.call(partial(copy, hop, rows, copies)))
        bound.append(steps.all_to_all(copies, counts.sent, arrived, counts.received, route.groups.tokens[level]))
        rows, sent[level] = arrived, copies.nbytes
    if bound:
        executor(like.device).run(hop_out(sent, route.groups.domains.levels), bound)
    return rows


Add = Callable[[torch.Tensor, RowMap, torch.Tensor | None], None]
"""Takes the copies [N, W] that have come back, and whose they are, and adds them; into [R, W] where they hop on."""


def _hop_back(rows: torch.Tensor, route: Route, add: Add) -> None:
    """What became of the rows that arrived in the end [N, W], to where they came from, level by level."""
    bound, received, like = [], {}, rows
    for hop in reversed(range(len(route.levels))):
        level, counts, row_map = route.levels[hop], route.plan.hops[hop], route.copies[hop]
        copies, summed = _empty(row_map.num_rows, like), _empty(row_map.num_tokens if hop else 0, like)
        bound.append(steps.all_to_all(rows, counts.received, copies, counts.sent, route.groups.tokens[level]))
        bound.append(steps.call(partial(add, copies, row_map, summed if hop else None)))
        rows, received[level] = summed, copies.nbytes
    if bound:
        executor(like.device).run(hop_back(received, route.groups.domains.levels), bound)


def _select(rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """rows[sources] in memory of the pool."""
    return torch.index_select(rows, 0, sources, out=_empty(sources.numel(), rows))


def _empty(number: int, like: torch.Tensor) -> torch.Tensor:
    return empty((number, like.size(1)), like.dtype, like.device)
