"""MoNTA: all-to-all between nodes and all-gather inside them, one after another or as a pipeline of chunks.

    dispatch   permute -> [ A2A(EP) -> AllGather(expert-TP) -> reorder by local expert ] for each chunk
    combine    [ reorder by source -> ReduceScatter(expert-TP) -> A2A(EP) ] for each chunk -> unpermute

(MoNTA, Figs. 5 to 9.) Every rank sends its own tokens once over the slow links; expert-TP peers share what arrived over
the fast ones, while the next chunk is on the slow ones. A token's probability travels behind its row in the same
message, so that a direction takes one all-to-all where stock Megatron takes two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.dispatchers.pipelining import Pipelining
from megatron_moe_opt.kernels import RowMap, build_row_map, permute_packed, unpermute_rows
from megatron_moe_opt.runtime.collectives import all_gather_rows
from megatron_moe_opt.runtime.exchange_plan import Sharing, plan_exchange, share_out
from megatron_moe_opt.runtime.expert_exchange import Exchange, to_experts, to_sources
from megatron_moe_opt.runtime.host_copy import HostCopy
from megatron_moe_opt.runtime.ways import EpWithExpertTp, way_of
from megatron_moe_opt.topology.expert_groups import ExpertGroups


@dataclass(frozen=True)
class Dispatched:
    """What dispatch learnt and combine needs; one object a forward pass."""

    row_map: RowMap
    counts: HostCopy
    """[ep_size, etp_size, experts] rows of every rank, on its way to the host."""
    groups: ExpertGroups
    level: str | None
    sharing: Sharing | None = None
    """How the ranks of a TP group, which all have these rows, share them out; None: no other rank has them."""

    @cached_property
    def exchange(self) -> Exchange:
        """Who sends what to whom; the first use waits for the counts to reach the host (the only host sync)."""
        groups, rows, counts = self.groups, self.row_map, self.counts.wait()
        ranks, device = (groups.ep_rank, groups.etp_rank), rows.rows.device
        if self.sharing is None:
            plan = plan_exchange(counts, *ranks, rows.num_chunks, device)
            return Exchange(way_of(groups, self.level), plan)
        sent, parts = share_out(counts, *ranks, self.sharing)
        return Exchange(EpWithExpertTp(groups, parts), plan_exchange(sent, *ranks, 1, device))


class MontaDispatcher:
    """Moves the tokens of one MoE layer to their experts and back."""

    def __init__(self, groups: ExpertGroups, pipelining: Pipelining) -> None:
        self.groups = groups
        self.pipelining = pipelining

    def describe(self) -> str:
        """What runs, for the line at start."""
        return f"{self.pipelining.describe()}, tokens and probabilities in one all-to-all"

    def take_copies(self, tp: ProcessGroup, tokens: torch.Tensor) -> bool:
        """Whether the dispatcher itself takes tokens that all ranks of a TP group hold, and returns all of them.

        False: they have to be split over TP before. Asked once, by all ranks of the group.

        Args:
            tokens: [T, H] such tokens; only their shape and dtype may be used.
        """
        return False

    def permute(
        self,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        *,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> tuple[torch.Tensor, Dispatched]:
        """Groups this rank's tokens by chunk and expert, each row with its probability behind it.

        Args:
            tokens: [T, H].
            probs: [T, E], any floating dtype.
            routing_map: bool [T, E].
            capacity: rows of every expert (drop and pad); None keeps what was routed.
            num_rows: number of routed pairs where it is known without asking the device.

        Returns:
            Packed rows [R, H + lane], and the state for the other three steps.
        """
        groups = self.groups
        shape, counts = (groups.ep_size, groups.etp_size, routing_map.size(1)), None
        if capacity is not None:  # every rank has `capacity` rows for every expert: nothing to ask
            counts = HostCopy(torch.full(shape, capacity))
        elif num_rows is None:  # the counts tell, which the host waits for anyway
            counts = HostCopy(all_gather_rows(routing_map.sum(0), None, groups.joint).view(shape))
            num_rows = int(counts.wait()[groups.ep_rank, groups.etp_rank].sum())
        row_map = build_row_map(routing_map, capacity=capacity, num_out_tokens=num_rows)
        if counts is None:
            counts = HostCopy(all_gather_rows(row_map.expert_counts, None, groups.joint).view(shape))
        return self._pack(tokens, probs, row_map, counts, groups)

    def _pack(
        self, tokens: torch.Tensor, probs: torch.Tensor, row_map: RowMap, counts: HostCopy, groups: ExpertGroups
    ) -> tuple[torch.Tensor, Dispatched]:
        level, num_chunks = self.pipelining.current
        row_map = row_map.cut(num_chunks)
        return permute_packed(tokens, probs, row_map), Dispatched(row_map, counts, groups, level)

    def dispatch(
        self, packed: torch.Tensor, dispatched: Dispatched, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows to the ranks that hold their experts, sorted by local expert.

        Returns:
            Expert inputs [R', H] in stock Megatron's order, rows per local expert (int64, CPU), probabilities [R'].
        """
        exchange = dispatched.exchange
        self.pipelining.observe(dispatched.counts.wait(), packed)
        tokens, probs = to_experts(packed, exchange, prob_dtype)
        return tokens, exchange.plan.tokens_per_expert, probs

    def combine(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """The sum of the expert shards' partial outputs, back on the ranks of their tokens: [R', H] -> [R, H]."""
        return to_sources(rows, dispatched.exchange)

    def unpermute(self, rows: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Sums each token's rows: [R, H] -> [T, H]."""
        return unpermute_rows(rows, dispatched.row_map)
