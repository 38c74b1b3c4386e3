"""MoNTA, level O1: one packed all-to-all between nodes, then an all-gather inside the node.

    dispatch   permute -> A2A(EP) -> AllGather(expert-TP) -> reorder by local expert
    combine    reorder by source -> ReduceScatter(expert-TP) -> A2A(EP) -> unpermute

(MoNTA, Fig. 5, and the sequential method of Fig. 6.) Every rank sends its own tokens once over the slow links;
expert-TP peers share what arrived over the fast ones. A token's probability travels behind its row in the same message,
so that a direction takes one all-to-all where stock Megatron takes two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_moe_opt.kernels import RowMap, build_row_map, permute_packed, unpermute_rows
from megatron_moe_opt.runtime.collectives import all_gather_rows
from megatron_moe_opt.runtime.exchange import all_to_all, gather_by_expert, reduce_to_source
from megatron_moe_opt.runtime.exchange_plan import ExchangePlan, plan_exchange
from megatron_moe_opt.runtime.host_copy import HostCopy
from megatron_moe_opt.topology.expert_groups import ExpertGroups


@dataclass(frozen=True)
class Dispatched:
    """What dispatch learnt and combine needs; one object a forward pass."""

    row_map: RowMap
    counts: HostCopy
    """[ep_size, etp_size, experts] rows of every rank, on its way to the host."""
    ep_rank: int
    etp_rank: int

    @cached_property
    def plan(self) -> ExchangePlan:
        """The exchange plan; the first use waits for the counts to reach the host (the only host sync)."""
        return plan_exchange(self.counts.wait(), self.ep_rank, self.etp_rank, self.row_map.rows.device)


class MontaDispatcher:
    """Moves the tokens of one MoE layer to their experts and back."""

    def __init__(self, groups: ExpertGroups, level: str = "O1") -> None:
        self.groups = groups
        self.level = level

    def describe(self) -> str:
        """What runs, for the line at start."""
        return f"level {self.level}, tokens and probabilities in one all-to-all"

    def permute(
        self,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        *,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> tuple[torch.Tensor, Dispatched]:
        """Groups this rank's tokens by expert, each row with its probability behind it.

        Args:
            tokens: [T, H].
            probs: [T, E], any floating dtype.
            routing_map: bool [T, E].
            capacity: rows of every expert (drop and pad); None keeps what was routed.
            num_rows: number of routed pairs where it is known without asking the device.

        Returns:
            Packed rows [R, H + lane], and the state for the other five steps.
        """
        groups = self.groups
        row_map = build_row_map(routing_map, capacity=capacity, num_out_tokens=num_rows)
        shape = (groups.ep_size, groups.etp_size, -1)
        if capacity is None:
            counts = HostCopy(all_gather_rows(row_map.expert_counts, None, groups.joint).view(shape))
        else:  # every rank has `capacity` rows for every expert: nothing to ask
            counts = HostCopy(torch.full((*shape[:2], routing_map.size(1)), capacity))
        dispatched = Dispatched(row_map, counts, groups.ep_rank, groups.etp_rank)
        return permute_packed(tokens, probs, row_map), dispatched

    def dispatch(self, packed: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """A2A(EP): rows to the ranks that hold their experts."""
        plan = dispatched.plan
        return all_to_all(packed, plan.receive_counts, plan.send_counts, self.groups.ep)

    def sort_by_expert(
        self, packed: torch.Tensor, dispatched: Dispatched, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """AllGather(expert-TP), then one copy that unpacks and sorts by local expert.

        Returns:
            Expert inputs [R', H] in stock Megatron's order, rows per local expert (int64, CPU), probabilities [R'].
        """
        tokens, probs = gather_by_expert(packed, dispatched.plan, self.groups.etp, prob_dtype)
        return tokens, dispatched.plan.tokens_per_expert, probs

    def sort_by_source(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Back to arrival order, then ReduceScatter(expert-TP): the sum of the expert shards' partial outputs."""
        return reduce_to_source(rows, dispatched.plan, self.groups.etp)

    def combine(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """A2A(EP): expert outputs back to the ranks of their tokens."""
        plan = dispatched.plan
        return all_to_all(rows, plan.send_counts, plan.receive_counts, self.groups.ep)

    def unpermute(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Sums each token's rows: [R, H] -> [T, H]."""
        return unpermute_rows(rows, dispatched.row_map)
