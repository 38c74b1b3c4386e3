"""A forward pass whose tokens hop: what all ranks are told before they do, and who sends what to whom then."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_moe_opt.dispatchers.dispatcher import Passage, counts_beyond
from megatron_moe_opt.runtime.engine.collectives import all_gather_rows
from megatron_moe_opt.runtime.engine.host_copy import HostCopy
from megatron_moe_opt.runtime.hops.hop_plan import HopPlan
from megatron_moe_opt.runtime.hops.hops_in_chunks import HopPlans
from megatron_moe_opt.runtime.hops.row_facts import check_overfull
from megatron_moe_opt.runtime.hops.token_hops import HoppingRows, TokenHops
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange
from megatron_moe_opt.runtime.rows.own_rows import OwnRows
from megatron_moe_opt.runtime.travelling_experts.migrated_experts import Lent, MigratedExperts
from megatron_moe_opt.topology.expert_groups import TokenCopies


@dataclass(frozen=True)
class HoppingTokens(Passage):
    """What is noted of a pass whose tokens hop; one object a forward pass."""

    hops: TokenHops
    rows: HoppingRows
    counts: HostCopy
    """The counts of every rank, [joint size, parts * counts of a part, overfull tokens, the news of migrated experts
    and, where a TP group shares out its tokens, those of each expert], on their way to the host.
    """
    lent: Lent | None
    """This rank's experts as the other ranks use them; None where none travels."""
    copies: TokenCopies | None
    """The TP group that shares out its tokens; None: every rank has tokens of its own."""
    beyond: HostCopy | None
    """What `counts_beyond` returns of this pass; None: the counts tell."""

    @classmethod
    def tell(
        cls,
        hops: TokenHops,
        rows: HoppingRows,
        routing_map_TE: torch.Tensor,
        migrated: MigratedExperts | None,
        copies: TokenCopies | None = None,
    ) -> HoppingTokens:
        """Lets all ranks of the joint group know what hops, and whether experts that travel have changed. A collective
        call over that group, and over a TP group that shares out its tokens beyond it.
        """
        told, lent, beyond = [rows.counts, rows.overfull], None, None
        if migrated is not None:
            told.append(migrated.news())
            lent = migrated.lent()
        if copies is not None:
            # Before the joint group's counts: when the host has waited for those, these are there.
            of_experts = routing_map_TE.sum(0)
            beyond = None if copies.inside else counts_beyond(copies, of_experts)
            told.append(of_experts)
        counts = HostCopy(all_gather_rows(torch.cat(told).view(1, -1), hops.experts.joint))
        return cls(hops, rows, counts, lent, copies, beyond)

    @property
    def own(self) -> OwnRows:
        """Returns this rank's own rows, before they are sent."""
        return self.rows.own

    @cached_property
    def exchanges(self) -> tuple[Exchange[HopPlan], ...]:
        """Returns who sends what to whom, for each part; the first use waits for the counts to reach the host."""
        counts, _, of_experts = self._counted
        if self.copies is not None:
            shape = (self.hops.experts.ep_size, self.hops.experts.etp_size, -1)
            self.copies.check_alike(of_experts.reshape(shape), self.beyond and self.beyond.wait())
        return self.hops.exchanges(counts, self.rows)

    @cached_property
    def exchange(self) -> Exchange[HopPlan] | Exchange[HopPlans]:
        """Returns who sends what to whom where all parts are one exchange; the first use waits as of `exchanges`."""
        counts, _, _ = self._counted
        return self.hops.exchange(counts, self.rows)

    @property
    def news(self) -> list[int]:
        """Returns what all ranks tell about changed experts, as `MigratedExperts.fetch` takes it."""
        _, news, _ = self._counted
        return news.amax(0).tolist()

    @property
    def _counted(self) -> tuple[torch.Tensor, ...]:
        # host synchronisation: for the counts, the only one of a forward pass
        counts, own = self.counts.wait(), self.rows.counts.numel()
        of_experts = 0 if self.copies is None else self.hops.num_experts
        news = counts.size(1) - own - 1 - of_experts
        of_parts, overfull, *others = counts.split([own, 1, news, of_experts], dim=1)
        check_overfull(overfull, self.hops.topk)
        return of_parts, *others
