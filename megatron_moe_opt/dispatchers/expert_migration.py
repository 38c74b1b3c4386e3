"""Expert migration: inside an expert domain experts travel, between domains tokens, level by level (HybridEP).

    dispatch   [ copies -> A2A ] for each level, outermost first -> permute by expert held here
    combine    sum over the experts held here -> [ A2A -> sum of the copies ] for each level, innermost first

(HybridEP, Fig. 8; section IV-A.) A rank holds the experts of all ranks of its domains, so that what arrives here is for
any of them; how they come here is runtime/travelling_experts/expert_communicator.py's. With domain size 1 at every
level no expert travels: that is expert parallelism hop by hop, in which a token crosses each link once, whatever its
number of experts. In chunks, tokens are on the links of several levels at once (schedules/hops.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_moe_opt.dispatchers.dispatcher import Dispatcher
from megatron_moe_opt.dispatchers.expert_domains import MeasuredDomains, describe_domains
from megatron_moe_opt.dispatchers.hopping_tokens import HoppingTokens
from megatron_moe_opt.row_format import SAME, Wire
from megatron_moe_opt.runtime.hops.token_hops import TokenHops
from megatron_moe_opt.runtime.travelling_experts.migrated_experts import MigratedExperts
from megatron_moe_opt.topology.domain_groups import DomainGroups, domain_groups
from megatron_moe_opt.topology.domains import ExpertDomains
from megatron_moe_opt.topology.expert_groups import ExpertGroups

Migrate = Callable[[DomainGroups, tuple[int, ...]], MigratedExperts]
"""Has a layer's experts travel in these groups, to hold those of these owners too (DomainTables.owners)."""


class ExpertMigrationDispatcher(Dispatcher):
    """Moves the tokens of one MoE layer to the ranks that hold their experts, and back."""

    def __init__(
        self,
        groups: ExpertGroups,
        domains: ExpertDomains | MeasuredDomains,
        num_experts: int,
        topk: int,
        wire: Wire = SAME,
        chunks: int = 1,
    ) -> None:
        """
        Args:
            domains: of the layer, or what chooses them at the first pass.
            wire: how tokens travel.
            chunks: of the tokens that hop, where the domains are not chosen.
        """
        self.groups, self.domains, self.wire, self.chunks = groups, domains, wire, chunks
        self.num_experts, self.topk = num_experts, topk
        self.hops: TokenHops | None = None
        """Where tokens hop; None until the domains are chosen: at the first pass, where they are measured."""
        self._migrate: Migrate | None = None
        """Has the layer's experts travel, once the domains are chosen; set by take_experts."""
        self.migrated: MigratedExperts | None = None
        """The experts of this layer that travel; None where none does."""

    def take_experts(self, migrate: Migrate) -> None:
        """Puts the experts of the layer in reach. A collective call over its groups."""
        self._migrate = migrate
        if isinstance(self.domains, ExpertDomains):
            self._settle(self.domains)

    def _settle(self, domains: ExpertDomains) -> None:
        groups = domain_groups(self.groups.ep, domains, self)
        self.hops = TokenHops(groups, self.groups, self.num_experts, self.topk, self.wire)
        if groups.migrates:
            self.migrated = self._migrate(groups, self.hops.tables.owners)

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        domains = self.domains
        named = describe_domains(domains) if isinstance(domains, ExpertDomains) else domains.describe()
        what = f"{named}, a token once over every link" + f", in {self.chunks} chunks" * (self.chunks > 1)
        return what if self.migrated is None else f"{what}; {self.migrated.describe()}"

    def permute(
        self,
        tokens_TH: torch.Tensor,
        probs: torch.Tensor,
        routing_map_TE: torch.Tensor,
        *,
        capacity: int | None = None,
        **_: int | None,
    ) -> tuple[torch.Tensor, HoppingTokens]:
        """Puts each token's facts behind it, and lets all ranks know how many copies there will be."""
        if self.hops is None:
            choice = self.domains.choose(tokens_TH.size(0), tokens_TH.device)
            self.chunks = choice.chunks
            self._settle(choice.domains)
        shares = [1] * self.chunks
        rows = self.hops.rows(tokens_TH, probs, routing_map_TE, shares, is_padded=capacity is not None)
        hopping = HoppingTokens.tell(self.hops, rows, routing_map_TE, self.migrated)
        return self.hops.pack(tokens_TH, probs, rows), hopping

    def dispatch(
        self, packed: torch.Tensor, dispatched: HoppingTokens, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sends tokens to the ranks that hold their experts, and sorts them there by owner and expert.

        Returns:
            Expert inputs [R, H], rows per expert held here (int64, CPU), probabilities [R].
        """
        if self.migrated is not None:
            self.migrated.fetch(dispatched.news)  # on their way while tokens are
        return super().dispatch(packed, dispatched, prob_dtype)
