"""Where the tokens of a MoE layer go, hop by hop: pure arithmetic on expert domains and agreed counts.

G ranks of the expert-parallel group, E experts, n = E / G of each rank; a *region* of level l is what the domains of
levels 0 .. l have in common, and an expert is in its owner's region. A token has one copy in every region that has one
of its experts. Ranks that agree on the counts of copies know the sizes of all messages of all hops, those included
that others send to each other: one small all-gather before the first hop, and no message about sizes after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.topology.domains import ExpertDomains

_C = load_extension()


@dataclass(frozen=True)
class HopCounts:
    """Rows of one rank in one hop, to and from the ranks of its all-to-all group."""

    sent: list[int]
    received: list[int]


@dataclass(frozen=True)
class HopPlan:
    """One rank's part in the hops of one forward pass."""

    hops: Mapping[int, HopCounts]
    """The hop at each level in `DomainTables.levels`, outermost first."""
    tokens_per_expert: torch.Tensor
    """The rows of each expert of the domain, int64 on the CPU, by owner (`DomainTables.owners`) and its experts."""
    num_gathered: int
    """Rows of the experts held here."""
    gather_counts: tuple[int, ...] = ()
    """Rows that have arrived at each rank of expert-TP in the end, where experts are cut."""

    @property
    def arrives_sorted(self) -> bool:
        """Whether each row that arrives is the one of an expert held here: what has hopped wants the only one."""
        return bool(self.hops) and self.tokens_per_expert.numel() == 1

    def arrived(self, num_tokens: int) -> int:
        """Returns the rows that have arrived in the end at this rank, which has so many tokens."""
        return sum(self.hops[max(self.hops)].received) if self.hops else num_tokens


class DomainTables:
    """Which experts lie behind which hop, seen from one rank. Experts are numbered by owner."""

    def __init__(self, domains: ExpertDomains, rank: int, num_experts: int) -> None:
        """
        Args:
            rank: in the expert-parallel group.
            num_experts: E; a multiple of the ranks.
        """
        self.domains, self.rank, self.num_experts = domains, rank, num_experts
        self.num_local = num_experts // domains.world
        self.levels = domains.hops
        places = torch.tensor([domains.location(one) for one in range(domains.world)], device="cpu")  # [G, levels]
        sizes = torch.tensor(domains.sizes, device="cpu")
        self._domain, self._offset = places // sizes, places % sizes
        self._place = places

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Returns the ranks whose experts this rank holds, itself included, in the order in which they are gathered.

        Gathered from the outermost level inwards: the offset at the outermost level changes fastest.
        """
        mine = self._domain[self.rank]
        owners = [one for one in range(self.domains.world) if torch.equal(self._domain[one], mine)]
        return tuple(sorted(owners, key=lambda one: self._offset[one].flip(0).tolist()))

    def region(self, level: int) -> torch.Tensor:
        """Returns the region of each rank at a level, int64 [G], counted from 0 with the innermost domain fastest."""
        region = torch.zeros(self.domains.world, dtype=torch.int64, device="cpu")
        for outer in range(level + 1):
            region = region * self.domains.domains(outer) + self._domain[:, outer]
        return region

    def num_regions(self, level: int) -> int:
        """How many different regions the ranks are in at a level."""
        return int(self.region(level).max()) + 1

    def region_of_experts(self, level: int) -> torch.Tensor:
        """Returns the region of each expert, int64 [E + 1]; entry E, "no expert", is in none: `num_regions`."""
        return self._of_experts(self.region(level), self.num_regions(level))

    def next_domain(self, level: int) -> torch.Tensor:
        """Returns the domain to which a row at this rank must hop at a level for each expert, int64 [E + 1].

        It is the number of domains, "none", for experts that another copy of the token goes to.
        """
        none = self.domains.domains(level)
        on_the_way = torch.ones(self.domains.world, dtype=torch.bool, device="cpu")
        if level > 0:
            region = self.region(level - 1)
            on_the_way = region == region[self.rank]
        return self._of_experts(torch.where(on_the_way, self._domain[:, level], none), none)

    @cached_property
    def place_in_domain(self) -> torch.Tensor:
        """Returns the place of each expert among those this rank holds, int64 [E + 1]; their number for all others."""
        none = len(self.owners) * self.num_local
        place = torch.full((self.num_experts + 1,), none, device="cpu")
        for position, owner in enumerate(self.owners):
            first, held = owner * self.num_local, position * self.num_local
            place[first : first + self.num_local] = torch.arange(held, held + self.num_local, device="cpu")
        return place

    @cached_property
    def arrival_order(self) -> torch.Tensor:
        """Returns the place of each rank's rows among those that arrive, int64 [G], where no expert travels."""
        order = sorted(range(self.domains.world), key=lambda rank: self._place[rank].flip(0).tolist())
        return torch.tensor(order, device="cpu").argsort()

    def _of_experts(self, of_rank: torch.Tensor, none: int) -> torch.Tensor:
        return torch.cat([of_rank.repeat_interleave(self.num_local), torch.tensor([none], device="cpu")])

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Returns where the counts of each level in `levels`, and of experts, begin in a rank's row of num_counts: its
        tokens' copies in the regions of each level, and its rows for each expert.
        """
        return tuple(accumulate((self.num_regions(level) for level in self.levels), initial=0))

    def plan(self, counts: torch.Tensor, etp_rank: int = 0) -> tuple[HopPlan, ...]:
        """Returns this rank's plan of each part of the tokens, made in one call (csrc/planning/hop_plan.cpp).

        Args:
            counts: int64 [G, etp_size, samples, parts, num_counts] on the CPU, the same on all ranks: of each part of
                each sample, or of all tokens as one. Behind them there may be the tokens of the part: all that arrive
                where none hops.
            etp_rank: of this rank, where the ranks of expert-TP each have tokens of their own.
        """
        domains = self.domains
        parts = _C.plan_hops(counts, domains.workers, domains.sizes, self.num_experts, self.rank, etp_rank)
        is_cut = counts.size(1) > 1
        return tuple(
            HopPlan(
                {level: HopCounts(sent, received) for level, sent, received in hops},
                tokens_per_expert,
                num_gathered,
                tuple(arrived) if is_cut else (),
            )
            for hops, tokens_per_expert, num_gathered, arrived in parts
        )
