"""FasterMoE's schedule, to time MPMoE against it: a dispatcher of benchmarks, and no system of the package.

Ranks are in groups of consecutive ones, four by default. Part j of a rank's rows are those for the j-th group after its
own: messages with one group after another are on their way while experts compute what has arrived (FasterMoE, section
4.2). With two groups MPMoE's pipeline sends in the same order, both parts out and then both back, which is why there
are no more here. Its shadowed experts are left out, as in MPMoE's comparison.
"""

from __future__ import annotations

from functools import cached_property

import torch

from megatron_moe_opt.dispatchers.dispatcher import map_rows
from megatron_moe_opt.dispatchers.mpmoe import MpmoeDispatcher, Partitioned, PartitionedRows
from megatron_moe_opt.dispatchers.partitioning import FixedPartitioning, Partitions
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.predicting.baselines import GROUP
from megatron_moe_opt.runtime.rows.exchange_plan import plan_exchange
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange
from megatron_moe_opt.runtime.rows.own_rows import permuted
from megatron_moe_opt.runtime.rows.ways import way_of
from megatron_moe_opt.topology.expert_groups import ExpertGroups

GROUPS = 2


class RowsByGroup(PartitionedRows):
    """The rows of a pass, one for each expert of a token, those for the experts of this rank's own group first.

    `counts` has each rank's experts in its own order, which begins with its group's.
    """

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """See PartitionedRows."""
        groups, source = self.groups, self.own.source
        counts = self.counts.wait()
        experts = counts.size(2) // GROUPS
        exchanges = []
        for part in range(GROUPS):
            of_part = torch.zeros_like(counts)
            of_part[:, :, part * experts : (part + 1) * experts] = counts[:, :, part * experts : (part + 1) * experts]
            in_order = [of_rank.roll(first_expert(rank, counts.size(0), counts.size(2)), -1)
                        for rank, of_rank in enumerate(of_part)]  # fmt: skip
            plan = plan_exchange(torch.stack(in_order), groups.ep_rank, 0, 1, source.row_map.rows.device)
            exchanges.append(Exchange(way_of(groups, "O1", source.payload), plan))
        return tuple(exchanges)


class FasterMoeDispatcher(MpmoeDispatcher):
    """Moves tokens through their experts, group by group of ranks."""

    def __init__(self, groups: ExpertGroups, ranks: int = GROUP) -> None:
        """
        Args:
            ranks: of a group.

        Raises:
            ConfigurationError: not two groups, or experts that are cut.
        """
        if groups.etp_size > 1 or groups.ep_size != GROUPS * ranks:
            raise ConfigurationError(
                f"FasterMoE's schedule is built for {GROUPS} groups of {ranks} ranks and whole experts, not for EP "
                f"{groups.ep_size}, expert-TP {groups.etp_size}"
            )
        super().__init__(groups, FixedPartitioning(Partitions(GROUPS)))

    def permute(
        self,
        tokens_TH: torch.Tensor,
        probs_TE: torch.Tensor,
        routing_map_TE: torch.Tensor,
        *,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> tuple[torch.Tensor, Partitioned]:
        """Groups this rank's tokens by group, and by rows by expert, each row with its probabilities behind it."""
        groups = self.groups
        first = first_expert(groups.ep_rank, groups.ep_size, routing_map_TE.size(1))
        in_order = routing_map_TE.roll(-first, 1)
        row_map, counts = map_rows(in_order, groups, capacity=capacity, num_rows=num_rows)
        packed, own = permuted(tokens_TH, probs_TE.roll(-first, 1), row_map, self.wire)
        partitions = Partitions(GROUPS)
        return packed, Partitioned(partitions, probs_TE.dtype, RowsByGroup(partitions, own, counts, groups))


def first_expert(ep_rank: int, ep_size: int, experts: int) -> int:
    """Returns the first expert of a rank's group."""
    return ep_rank * GROUPS // ep_size * (experts // GROUPS)
