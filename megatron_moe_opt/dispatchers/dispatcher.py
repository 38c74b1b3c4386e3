"""What a dispatcher is, and the pass of rows that several of them share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.kernels import RowMap, build_row_map
from megatron_moe_opt.runtime.engine.collectives import all_gather_rows
from megatron_moe_opt.runtime.engine.host_copy import HostCopy
from megatron_moe_opt.runtime.rows.exchange_plan import Sharing, plan_exchange, share_out
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange, to_experts, to_sources
from megatron_moe_opt.runtime.rows.own_rows import OwnRows
from megatron_moe_opt.runtime.rows.ways import EpWithExpertTp, way_of
from megatron_moe_opt.topology.expert_groups import ExpertGroups, TokenCopies


class Dispatcher(Protocol):
    """Moves the tokens of one MoE layer to their experts and back. A forward pass goes through its four steps in turn.

    What `permute` has noted of the pass does the other three, where a dispatcher has nothing to add.
    """

    groups: ExpertGroups
    """The groups between whose ranks rows move."""

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""

    def take_copies(self, tp: ProcessGroup, tokens_TH: torch.Tensor) -> bool:
        """Whether the dispatcher itself takes tokens that all ranks of a TP group hold, and returns all of them.

        False: they have to be split over TP before. Asked once, by all ranks of the group.

        Args:
            tokens_TH: [T, H] such tokens; only their shape and dtype may be used.
        """
        return False

    def permute(
        self,
        tokens_TH: torch.Tensor,
        probs_TE: torch.Tensor,
        routing_map_TE: torch.Tensor,
        *,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Makes of this rank's tokens the rows to send.

        Args:
            tokens_TH: [T, H].
            probs_TE: [T, E], any floating dtype.
            routing_map_TE: bool [T, E].
            capacity: rows of every expert (drop and pad); None keeps what was routed.
            num_rows: number of routed pairs where it is known without asking the device.

        Returns:
            What stands for the rows, which autograd does not see (runtime/rows/wire_rows.py); and the state for the
            other three steps.
        """

    def dispatch(
        self, packed: torch.Tensor, dispatched: Any, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Sends rows to the ranks that hold their experts, and sorts them there by local expert.

        Returns:
            Expert inputs [N, H] in stock Megatron's order, rows per local expert (int64, CPU), probabilities [N].
        """
        return dispatched.dispatch(packed, prob_dtype)

    def combine(self, rows_NH: torch.Tensor, dispatched: Any) -> torch.Tensor:
        """Sends the partial outputs [N, H] back to the ranks of their tokens, summed over the shards of an expert, and
        returns what stands for the returned rows until `unpermute`.
        """
        return dispatched.combine(rows_NH)

    def unpermute(self, returned: torch.Tensor, dispatched: Any) -> torch.Tensor:
        """Sums each token's rows: returns the outputs [T, H], given what stands for the rows."""
        return dispatched.unpermute(returned)


class Passage:
    """The rows of one forward pass that go to their experts in one exchange, and come back to where they came from."""

    own: OwnRows
    """This rank's rows, before they are sent."""
    exchange: Exchange
    """Who sends what to whom; the first use waits for the counts to reach the host."""

    def dispatch(
        self, packed: torch.Tensor, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the experts' inputs, rows per expert and probabilities, as Dispatcher.dispatch says."""
        tokens_NH, probs_N = to_experts(packed, self.own.wire, self.exchange, prob_dtype)
        return tokens_NH, self.exchange.plan.tokens_per_expert, probs_N

    def combine(self, rows_NH: torch.Tensor) -> torch.Tensor:
        """Returns what stands for the rows that came back from their experts, as Dispatcher.combine says."""
        return to_sources(rows_NH, self.own.wire, self.exchange)

    def unpermute(self, returned: torch.Tensor) -> torch.Tensor:
        """Returns each token's sum of its rows, [T, H], as Dispatcher.unpermute says."""
        return self.own.unpermute(returned)


@dataclass(frozen=True)
class Dispatched(Passage):
    """What `permute` has noted of the rows of one forward pass. Its own rows are PermutedRows."""

    own: OwnRows
    counts: HostCopy
    """The rows of every rank for each expert, [ep_size, etp_size, experts], on their way to the host."""
    groups: ExpertGroups
    level: str | None = "O1"
    """The level of MoNTA's pipeline, which decides the way that rows take (ways.way_of)."""
    sharing: Sharing | None = None
    """How the ranks of a TP group, which all have these rows, share them out; None: no other rank has them."""

    @cached_property
    def exchange(self) -> Exchange:
        """Returns who sends what to whom; the first use waits for the counts to reach the host."""
        # host synchronisation: for the counts, the only one of a forward pass (docs/design.md)
        groups, source, counts = self.groups, self.own.source, self.counts.wait()
        ranks, device = (groups.ep_rank, groups.etp_rank), source.row_map.rows.device
        check_routed(source.row_map, counts[ranks])
        if self.sharing is None:
            plan = plan_exchange(counts, *ranks, source.row_map.num_chunks, device)
            return Exchange(way_of(groups, self.level, source.payload), plan)
        sent, parts = share_out(counts, *ranks, self.sharing)
        return Exchange(EpWithExpertTp(groups, source.payload, parts), plan_exchange(sent, *ranks, 1, device))


def check_routed(row_map: RowMap, counts_E: torch.Tensor) -> None:
    """Raises RuntimeError where tokens were routed to fewer experts than promised, as tokens of NaNs are, or to more.

    Args:
        row_map: of this rank's rows, of which so many were promised as it has.
        counts_E: how many rows it has for each expert, on the CPU.
    """
    routed = int(counts_E.sum())
    if routed != row_map.num_rows:
        raise RuntimeError(
            f"{routed} rows of {row_map.num_tokens} tokens were routed where --moe-router-topk gives "
            f"{row_map.num_rows}: Transformer Engine's router (--moe-router-fusion) gives a token of NaNs fewer, and a "
            "routing of one's own may give others. Look for where NaNs come from (--check-for-nan-in-loss-and-grad), "
            "drop --moe-router-fusion, or have a router of a class of its own do such a routing"
        )


def counts_beyond(copies: TokenCopies, of_experts: torch.Tensor) -> HostCopy:
    """Returns the tokens that each rank of a TP group, which hold the same ones, has routed to each expert: int64
    [tp_size, experts], on its way to the host. For groups that reach beyond the joint group, whose counts do not tell.
    A collective call over the TP group.

    Args:
        of_experts: int64 [experts], those of this rank.
    """
    return HostCopy(all_gather_rows(of_experts, copies.group).view(copies.group.size(), -1))


def map_shared_rows(
    routing_map_TE: torch.Tensor, groups: ExpertGroups, copies: TokenCopies | None, **sizes: int | None
) -> tuple[RowMap, HostCopy, HostCopy | None]:
    """Returns what `map_rows` does where the ranks of a TP group may have the same rows; and what `counts_beyond` does,
    where that group reaches beyond the joint group and padding does not tell.

    Args:
        copies: None: no other rank has them.
    """
    beyond = None
    if copies is not None and not copies.inside and sizes.get("capacity") is None:
        # Before the joint group's counts: when the host has waited for those, these are there.
        beyond = counts_beyond(copies, routing_map_TE.sum(0))
    return *map_rows(routing_map_TE, groups, **sizes), beyond


def map_rows(
    routing_map_TE: torch.Tensor, groups: ExpertGroups, *, capacity: int | None = None, num_rows: int | None = None
) -> tuple[RowMap, HostCopy]:
    """Returns which rows this rank's tokens make and, on their way to the host, how many rows every rank has for each
    expert, [ep_size, etp_size, experts]. A collective call over the groups; arguments as of Dispatcher.permute.
    """
    shape, counts = (groups.ep_size, groups.etp_size, routing_map_TE.size(1)), None
    if capacity is not None:  # every rank has `capacity` rows for every expert: nothing to ask
        counts = HostCopy(torch.full(shape, capacity))
    elif num_rows is None:  # the counts tell, which the host waits for anyway
        counts = HostCopy(all_gather_rows(routing_map_TE.sum(0), groups.joint).view(shape))
        # host synchronisation: how many rows a capacity has left, without padding, or a routing of one's own gives
        num_rows = int(counts.wait()[groups.ep_rank, groups.etp_rank].sum())
    row_map = build_row_map(routing_map_TE, capacity=capacity, num_out_tokens=num_rows)
    if counts is None:
        counts = HostCopy(all_gather_rows(row_map.expert_counts, groups.joint).view(shape))
    return row_map, counts
