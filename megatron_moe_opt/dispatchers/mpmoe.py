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

from megatron_moe_opt.dispatchers.dispatcher import Dispatcher, map_rows
from megatron_moe_opt.dispatchers.partitioning import Partitioning, Partitions
from megatron_moe_opt.kernels import RowMap, permute_packed, unpermute_rows
from megatron_moe_opt.runtime.engine.host_copy import HostCopy
from megatron_moe_opt.runtime.rows.exchange_plan import ExchangePlan, plan_partitions
from megatron_moe_opt.runtime.rows.ways import way_of
from megatron_moe_opt.runtime.through_experts.expert_call import Experts
from megatron_moe_opt.runtime.through_experts.expert_pipeline import through_experts
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
    def plans(self) -> tuple[ExchangePlan, ...]:
        """Who sends what to whom, for each partition; the first use waits for the counts to reach the host."""
        groups, device = self.groups, self.row_map.rows.device
        # host synchronisation: for the counts, the only one of a forward pass; `permute` may have waited for them
        return plan_partitions(self.counts.wait(), groups.ep_rank, groups.etp_rank, self.partitions.count, device)


class MpmoeDispatcher(Dispatcher):
    """Moves tokens through their experts, too."""

    def __init__(self, groups: ExpertGroups, partitioning: Partitioning) -> None:
        self.groups = groups
        self.partitioning = partitioning

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        return self.partitioning.describe()

    def permute(
        self, tokens_TH: torch.Tensor, probs_TE: torch.Tensor, routing_map_TE: torch.Tensor, **sizes: int | None
    ) -> tuple[torch.Tensor, Partitioned]:
        """Groups this rank's tokens by partition and expert, each row with its probability behind it."""
        groups = self.groups
        row_map, counts = map_rows(routing_map_TE, groups, **sizes)
        # host synchronisation: for the counts, where the number of partitions depends on the rows of the pass
        partitions = self.partitioning.choose(lambda: int(counts.wait().sum()) // groups.joint_size)
        row_map = row_map.cut(partitions.count)
        packed_RP = permute_packed(tokens_TH, probs_TE, row_map)
        return packed_RP, Partitioned(row_map, counts, groups, partitions, probs_TE.dtype)

    def dispatch(
        self, packed_RP: torch.Tensor, partitioned: Partitioned, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, None, torch.Tensor]:
        """Rows as they are, with their probabilities behind them: `through_experts` sends them."""
        return packed_RP, None, packed_RP.new_empty(0)

    def through_experts(self, packed_RP: torch.Tensor, partitioned: Partitioned, experts: Experts) -> torch.Tensor:
        """Dispatch, experts and combine: packed rows [R, H + lane] -> their outputs [R, H]."""
        way, strategy = way_of(self.groups, "O1"), partitioned.partitions.strategy
        return through_experts(packed_RP, experts, way, partitioned.plans, strategy, partitioned.prob_dtype)

    def combine(self, rows_RH: torch.Tensor, partitioned: Partitioned) -> torch.Tensor:
        """Rows as they are: they are back already."""
        return rows_RH

    def unpermute(self, rows_RH: torch.Tensor, partitioned: Partitioned) -> torch.Tensor:
        """Sums each token's rows: [R, H] -> [T, H]."""
        return unpermute_rows(rows_RH, partitioned.row_map)
