"""MPMoE: the rows in n partitions, and dispatch, experts and combine of the partitions as one pipeline.

    permute -> [ S0 | S1 | R0 | S2 | R1 | ... ]  -> unpermute        S: dispatch, R: combine, alternating
                    [ C0 | C1 | C2 ... ]                             C: experts

(MPMoE, Fig. 4b.) Each expert's rows are cut into n parts, and partition j is part j of all experts: the partitions
are equal to a row whatever the routing. Partitions may share buffers; backward restores what is overwritten (Table II).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_moe_opt.dispatchers.monta import MontaDispatcher
from megatron_moe_opt.dispatchers.partitioning import Partitioning, Partitions
from megatron_moe_opt.kernels import RowMap, permute_packed
from megatron_moe_opt.runtime.exchange_plan import plan_partitions
from megatron_moe_opt.runtime.expert_call import Experts
from megatron_moe_opt.runtime.expert_exchange import Exchange
from megatron_moe_opt.runtime.expert_pipeline import through_experts
from megatron_moe_opt.runtime.host_copy import HostCopy
from megatron_moe_opt.topology.expert_groups import ExpertGroups


@dataclass(frozen=True)
class Partitioned:
    """What permute learnt and the pipeline needs; one object a forward pass."""

    row_map: RowMap
    counts: HostCopy
    """[ep_size, etp_size, experts] rows of every rank, on its way to the host."""
    groups: ExpertGroups
    partitions: Partitions
    prob_dtype: torch.dtype

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Who sends what to whom, for each partition; the first use waits for the counts to reach the host."""
        groups, device = self.groups, self.row_map.rows.device
        plans = plan_partitions(self.counts.wait(), groups.ep_rank, groups.etp_rank, self.partitions.count, device)
        return tuple(Exchange(groups, plan, "O1") for plan in plans)


class MpmoeDispatcher(MontaDispatcher):
    """Moves the tokens of one MoE layer through their experts and back."""

    def __init__(self, groups: ExpertGroups, partitioning: Partitioning) -> None:
        self.groups = groups
        self.partitioning = partitioning

    def describe(self) -> str:
        """What runs, for the line at start."""
        return self.partitioning.describe()

    def _pack(
        self, tokens: torch.Tensor, probs: torch.Tensor, row_map: RowMap, counts: HostCopy, groups: ExpertGroups
    ) -> tuple[torch.Tensor, Partitioned]:
        partitions = self.partitioning.choose(lambda: int(counts.wait().sum()) // groups.joint_size)
        row_map = row_map.cut(partitions.count)
        partitioned = Partitioned(row_map, counts, groups, partitions, probs.dtype)
        return permute_packed(tokens, probs, row_map), partitioned

    def dispatch(
        self, packed: torch.Tensor, partitioned: Partitioned, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, None, torch.Tensor]:
        """Rows as they are, with their probabilities behind them: `through_experts` sends them."""
        return packed, None, packed.new_empty(0)

    def through_experts(self, packed: torch.Tensor, partitioned: Partitioned, experts: Experts) -> torch.Tensor:
        """Dispatch, experts and combine: packed rows [R, H + lane] -> their outputs [R, H]."""
        partitions = partitioned.partitions
        return through_experts(
            packed,
            experts,
            partitioned.exchanges,
            partitions.strategy,
            partitioned.prob_dtype,
            partitions.observe,
        )

    def combine(self, rows: torch.Tensor, partitioned: Partitioned) -> torch.Tensor:
        """Rows as they are: they are back already."""
        return rows
