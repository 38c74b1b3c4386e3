"""Tokens to the domains of their experts and back, level by level: differentiable functions around the executor.

    to_experts    for each level, outermost first: copies -> all-to-all; then a row for each expert held here
    to_tokens     sum over the experts held here; then for each level, innermost first: all-to-all -> sum of the copies

A token crosses a link once however many of its experts are behind it, and one sum comes back (HybridEP's multi-hop
all-to-all; the paper sends a row for every expert). The backward pass of each function runs the other's moves on
gradients. Sums are taken in float32 in the order of destinations, and rounded once a hop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_moe_opt.kernels import RowMap, build_row_map, empty, sum_packed_rows
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.engine.started import advance_started
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange
from megatron_moe_opt.runtime.rows.hop_plan import HopPlan
from megatron_moe_opt.runtime.rows.hop_way import FactSums, Hops, Sums, TokenSums, present
from megatron_moe_opt.runtime.rows.linear import linear
from megatron_moe_opt.runtime.rows.row_facts import RowFacts


@dataclass
class Route:
    """One forward pass of a layer: who gets how many rows, and, once tokens are on their way, which."""

    exchange: Exchange[HopPlan]
    """By way of Hops."""
    held: RowMap | None = None
    """Of the rows that arrived, the rows of each expert held here."""
    pairs: torch.Tensor | None = None
    """int64 [rows of the experts held here]: row that arrived * K + place among its facts."""

    @property
    def hops(self) -> Hops:
        """The way."""
        return self.exchange.way

    @property
    def facts(self) -> RowFacts:
        """Of its rows."""
        return self.hops.facts


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
        sums = TokenSums(route.facts, sum_packed_rows(rows.contiguous(), route.facts.hidden, route.held))
        _hop_back(sums.tokens, route, sums)
        return sums.tokens

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
        sums = FactSums(facts, rows, probs.view(-1, facts.topk))
        if route.hops.levels:
            _hop_back(facts.pack(sums.tokens, sums.probs), route, sums)
        return sums.tokens, sums.probs, None, None


def _find_held(experts: torch.Tensor, route: Route) -> None:
    """Notes which rows that arrived, with `experts` int64 [R, K], go to which of the experts held here."""
    tables, per_expert = route.hops.tables, route.exchange.plan.tokens_per_expert
    topk, device, num_rows = experts.size(1), experts.device, int(per_expert.sum())
    places, held = tables.place_in_domain[experts], per_expert.numel()
    route.held = build_row_map(present(places, held), num_out_tokens=num_rows)
    fact = torch.zeros(experts.size(0), held + 1, dtype=torch.int64, device=device)
    fact.scatter_(1, places, torch.arange(topk, device=device).expand(experts.shape))
    numbers = torch.arange(held, device=device)
    expert = numbers.repeat_interleave(route.held.expert_counts, output_size=num_rows)
    sources = route.held.sources
    route.pairs = sources * topk + fact[sources, expert]


def _hop_out(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Copies of rows [R, W] to the domains of each level in turn; the rows that arrive here in the end [N, W]."""
    way, plan = route.exchange.way, route.exchange.plan
    schedule = way.dispatch(plan, rows.size(1) * rows.element_size())
    if not schedule.ops:
        return rows
    tensor = route.exchange.tensors({"rows": rows}, lambda number: _empty(number, rows))
    bound = [way.step_out(op, tensor(op.reads[0], 0), tensor(op.writes[0], 0), plan) for op in schedule.ops]
    executor(rows.device).run(schedule, bound)
    return tensor(schedule.ops[-1].writes[0], 0)


def _hop_back(rows: torch.Tensor, route: Route, sums: Sums) -> None:
    """What became of the rows that arrived in the end [N, W], to where they came from, level by level."""
    way, plan = route.exchange.way, route.exchange.plan
    schedule = way.combine(plan, rows.size(1) * rows.element_size())
    tensor = route.exchange.tensors({"arrived": rows}, lambda number: _empty(number, rows))
    bound = [
        way.step_back(op, [tensor(name, 0) for name in op.reads], tensor(op.writes[0], 0), plan, sums)
        for op in schedule.ops
    ]
    if bound:
        executor(rows.device).run(schedule, bound)


def _select(rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """rows[sources] in memory of the pool."""
    return torch.index_select(rows, 0, sources, out=_empty(sources.numel(), rows))


def _empty(number: int, like: torch.Tensor) -> torch.Tensor:
    return empty((number, like.size(1)), like.dtype, like.device)
