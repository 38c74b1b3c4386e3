"""Tokens as rows that hop between expert domains: what goes behind them, and how many go where.

A row is a token with its facts (row_facts.py), one for all of its experts. It goes to the domains of its experts by way
of hop_way.py's Hops, as any rows do by theirs (expert_exchange.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.kernels.streams import to_device
from megatron_moe_opt.row_format import SAME, Wire
from megatron_moe_opt.runtime.hops.hop_plan import DomainTables, HopPlan
from megatron_moe_opt.runtime.hops.hop_way import DeviceTables, Hops
from megatron_moe_opt.runtime.hops.hops_in_chunks import HopPlans, HopsInChunks
from megatron_moe_opt.runtime.hops.row_facts import RowFacts, experts_of_tokens, overfull_tokens
from megatron_moe_opt.runtime.hops.token_share import TokenShare
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange
from megatron_moe_opt.runtime.rows.own_rows import OwnRows, Source
from megatron_moe_opt.runtime.rows.row_layout import Payload
from megatron_moe_opt.topology.domain_groups import DomainGroups
from megatron_moe_opt.topology.expert_groups import ExpertGroups


@dataclass(frozen=True)
class TokensWithFacts(Source):
    """A source with a row for each token, its experts behind it. What returns is summed already, in the tokens' dtype.

    Of tokens that a TP group shares out, the rows of this rank's share set out, and those of all tokens come back.
    """

    facts: RowFacts
    experts: torch.Tensor
    """The experts of each token that sets out, int64 [T, K]."""
    notes: torch.Tensor | None = None
    """A note that travels with each token, int64 [T] (RowFacts); None: there is none."""
    share: TokenShare | None = None
    """This rank's share of tokens that all ranks of a TP group hold; None: the tokens are its own."""

    def pack(self, tokens_TH: torch.Tensor, probs_TK: torch.Tensor) -> torch.Tensor:
        """Returns tokens and probabilities as rows on their way to the experts."""
        layout = self.facts.outbound()
        return layout.pack(self._setting_out(tokens_TH), self._setting_out(probs_TK), self.experts.int(), self.notes)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradients of tokens and probabilities, made of those of their rows."""
        layout = self.facts.homebound(has_probs=True).at_source
        return layout.tokens(rows), layout.probs(rows)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the output of each token [T, H], the sum of its rows."""
        return rows

    def spread(self, grad_TH: torch.Tensor) -> torch.Tensor:
        """Returns gradients of tokens as rows on their way to the experts."""
        return self.facts.outbound(has_facts=False).narrow(self._setting_out(grad_TH))

    def _setting_out(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.share is None else self.share.of(tokens)


@dataclass(frozen=True)
class HoppingRows:
    """The tokens of one forward pass of a rank as rows, and what is known of them."""

    own: OwnRows
    facts: RowFacts
    experts: torch.Tensor
    """The experts of each token that this rank holds, int64 [T, K], see experts_of_tokens."""
    parts: tuple[int, ...]
    """The numbers of rows that hop together, one part after another."""
    counts: torch.Tensor
    """The counts of the parts, int64 [parts * (num_counts + 1)], see DeviceTables.count."""
    overfull: torch.Tensor
    """How many tokens have more experts than a row has room for, int64 [1], see overfull_tokens."""
    tp: ProcessGroup | None = None
    """The group that has shared out its tokens and gets back those of all its ranks; None: they are a rank's own."""


class TokenHops:
    """Sends the tokens of a layer from domain to domain."""

    def __init__(
        self, groups: DomainGroups, experts: ExpertGroups, num_experts: int, topk: int, wire: Wire = SAME
    ) -> None:
        """
        Args:
            groups: made within the expert-parallel one of `experts`.
            topk: experts of a token, at most.
            wire: how rows travel.
        """
        self.groups, self.experts, self.topk, self.num_experts = groups, experts, topk, num_experts
        self.wire = wire
        self.tables = DomainTables(groups.domains, groups.rank, num_experts)
        self._on_device: dict[torch.device, DeviceTables] = {}

    def rows(
        self,
        tokens_TH: torch.Tensor,
        probs_TE: torch.Tensor,
        routing_map_TE: torch.Tensor,
        shares: Sequence[int] = (1,),
        is_padded: bool = False,
        tp: ProcessGroup | None = None,
    ) -> HoppingRows:
        """Counts the copies that there will be of tokens. `pack` comes behind what sends the counts to the host, which
        waits for them and not for it.

        Args:
            shares: of the tokens, that each part of them has; parts hop one after another.
            is_padded: experts' rows are filled up to their capacity with tokens of probability 0. They do not travel:
                outputs and gradients of such rows are 0.
            tp: the group whose ranks all hold these tokens, and share them out; None: they are this rank's own.
        """
        if is_padded:
            routing_map_TE = routing_map_TE & (probs_TE != 0)
        facts = RowFacts(Payload.of(tokens_TH, self.wire), self.topk, probs_TE.dtype)
        experts = own_experts = experts_of_tokens(routing_map_TE, self.topk)
        overfull = overfull_tokens(routing_map_TE, self.topk)
        number = tokens_TH.size(0) // (1 if tp is None else tp.size())
        bounds = [number * share // sum(shares) for share in accumulate(shares, initial=0)]
        parts = tuple(end - begin for begin, end in pairwise(bounds))
        share = None if tp is None else TokenShare(tp, parts)
        if share is not None:
            own_experts, routing_map_TE = share.of(experts), share.of(routing_map_TE)
        counts = self.on_device(tokens_TH.device).count(own_experts, routing_map_TE, parts)
        own = OwnRows(TokensWithFacts(facts, own_experts, share=share))
        return HoppingRows(own, facts, experts, parts, counts, overfull, tp)

    def pack(self, tokens_TH: torch.Tensor, probs_TE: torch.Tensor, rows: HoppingRows) -> torch.Tensor:
        """Packs each token with its facts. Returns what stands for the rows, differentiable in tokens and
        probabilities.
        """
        return rows.own.pack(tokens_TH, self.probs_of(probs_TE, rows.experts))

    def probs_of(self, probs_TE: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Returns the probabilities [T, K] of tokens' experts, int64 [T, K], see experts_of_tokens. Differentiable."""
        routed = experts < self.num_experts
        return probs_TE.gather(1, experts.clamp(max=self.num_experts - 1)).masked_fill(~routed, 0)

    def exchanges(self, counts: torch.Tensor, rows: HoppingRows) -> tuple[Exchange[HopPlan], ...]:
        """Returns who sends which rows to whom, for each part of them.

        Args:
            counts: int64 [joint size, parts * (num_counts + 1)] on the CPU, of all ranks of the joint group.
        """
        plans = self._plans(counts, rows)
        ways = [self._way(rows.facts, of_part, rows.counts.device, rows.tp) for of_part in rows.parts]
        return tuple(Exchange(way, plan) for way, plan in zip(ways, plans, strict=True))

    def exchange(self, counts: torch.Tensor, rows: HoppingRows) -> Exchange[HopPlan] | Exchange[HopPlans]:
        """Returns who sends which rows to whom, all parts of a rank's own tokens in one exchange. `counts` as of
        `exchanges`.
        """
        if len(rows.parts) == 1:
            (whole,) = self.exchanges(counts, rows)
            return whole
        plans = self._plans(counts, rows)
        return self.in_chunks(rows.facts, rows.parts, plans, rows.counts.device)

    def in_chunks(
        self, facts: RowFacts, chunks: Sequence[int], plans: tuple[HopPlan, ...], device: torch.device
    ) -> Exchange[HopPlans]:
        """Returns the exchange of chunks of so many tokens of this rank's, by these plans."""
        of_all = HopPlans(plans, sum(plan.num_gathered for plan in plans))
        firsts = to_device(of_all.first, device) if len(plans) > 1 else [None]
        ways = [self._way(facts, of_chunk, device, first=first) for of_chunk, first in zip(chunks, firsts, strict=True)]
        return Exchange(HopsInChunks(ways), of_all)

    def _plans(self, counts: torch.Tensor, rows: HoppingRows) -> tuple[HopPlan, ...]:
        return self.plan(counts.view(self.experts.ep_size, self.experts.etp_size, 1, len(rows.parts), -1))

    def _way(
        self,
        facts: RowFacts,
        num_tokens: int,
        device: torch.device,
        tp: ProcessGroup | None = None,
        first: torch.Tensor | None = None,
    ) -> Hops:
        return Hops(self.groups, self.on_device(device), facts, num_tokens, self.experts.etp, tp, first)

    def plan(self, counts: torch.Tensor) -> tuple[HopPlan, ...]:
        """Returns the plans of all parts, from the joint group's counts as `DomainTables.plan` takes them."""
        return self.tables.plan(counts, self.experts.etp_rank)

    def on_device(self, device: torch.device) -> DeviceTables:
        """Returns the tables on the device where rows are."""
        if device not in self._on_device:
            self._on_device[device] = DeviceTables(self.tables, device)
        return self._on_device[device]
