"""What samples exchange with the devices that they could be on, and what that is on each kind of link.

A row for every expert of a token crosses the link to each of them; a token that hops crosses each link once, whatever
the experts behind it. Both are counted by sample, in columns that the way's rows define (runtime/rows).

Shapes: R ranks that share experts, B samples of a rank, C columns, E experts, J devices.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

import numpy as np

from megatron_moe_opt.planning.predicting.placement_volume import (
    Volume,
    crossings,
    placement_volume,
    tokens_by_device,
)
from megatron_moe_opt.topology.domains import ExpertDomains
from megatron_moe_opt.topology.sample_holders import SampleHolders


class SampleCosts(Protocol):
    """The costs of placing samples, for one way that rows travel."""

    device_node: np.ndarray
    """The node of each device, [J], as the solver takes it."""

    def by_expert(self, counts: np.ndarray) -> np.ndarray:
        """Returns the rows for each expert, [..., E], of counts int64 [..., C]."""

    def on_device(self, counts: np.ndarray, beside: int = 0) -> np.ndarray:
        """Returns what stays off the links for each sample on each device, more between nodes before less inside them.

        Args:
            counts: int64 [R, B, C] of each part of a sample.
            beside: rows that each part of a sample sends, where it moves, besides.

        Returns:
            int64 [R B / parts of a sample, J], by position.
        """

    def volumes(self, counts: np.ndarray, here: np.ndarray, there: np.ndarray, beside: int) -> tuple[Volume, Volume]:
        """Returns the rows of a pass that are sent in dispatch, and in combine.

        Args:
            counts: int64 [R * B, C].
            here, there: integers [R * B], the rank that each part of a sample is on, and goes to.
        """


class RowCosts:
    """The costs where a token has a row for every expert: columns are experts."""

    def __init__(self, holders: SampleHolders, num_experts: int) -> None:
        self._holders, self.device_node = holders, holders.device_node
        self._expert_device = np.repeat(holders.ep_device, num_experts // len(holders.ep_device))

    def by_expert(self, counts: np.ndarray) -> np.ndarray:
        """Returns the rows for each expert, int64 [..., E]."""
        return counts

    def on_device(self, counts: np.ndarray, beside: int = 0) -> np.ndarray:
        """Returns what stays off the links for each sample on each device, by position."""
        holders = self._holders
        num = holders.by_position(counts)
        on_device = tokens_by_device(num, self._expert_device, holders.num_devices)
        own = np.repeat(holders.holder_device, counts.shape[1])
        on_device[np.arange(len(num)), own] += beside * holders.ranks.shape[1]
        return on_device

    def volumes(self, counts: np.ndarray, here: np.ndarray, there: np.ndarray, beside: int) -> tuple[Volume, Volume]:
        """Returns what SampleCosts.volumes says."""
        etp_size = self._holders.etp_size  # what stays on an EP rank is no message, whichever of its shards has it
        inter, intra = crossings(here // etp_size, there // etp_size, self._holders.rank_node[::etp_size])
        combined = self.of_ranks(counts, there)
        with_beside = Volume(combined.inter + beside * inter, combined.intra + beside * intra, combined.local)
        return self.of_ranks(counts, here), with_beside

    def of_ranks(self, counts: np.ndarray, rank: np.ndarray) -> Volume:
        """Returns the rows of one all-to-all over EP by link, with part i of the samples on rank[i]."""
        holders = self._holders
        ep_size = len(holders.ep_device)
        on_ep = counts.reshape(len(counts), ep_size, -1).sum(2)
        return placement_volume(on_ep, rank // holders.etp_size, holders.rank_node[:: holders.etp_size])


class HopCosts:
    """The costs where a token goes once over every link: columns are a token's copies in the regions of each level, and
    its rows for each expert, as DomainTables counts them, chunk by chunk. No expert travels. What expert-TP adds inside
    nodes is left out.

    Inside, W ranks of an expert-parallel group are what regions consist of.
    """

    def __init__(
        self, holders: SampleHolders, domains: ExpertDomains, num_experts: int, num_chunks: int, apart: bool = False
    ) -> None:
        """
        Args:
            apart: what goes beside is not summed with a token's other rows on links that these cross, too.
        """
        self._holders, self._experts, self._num_chunks, self._apart = holders, num_experts, num_chunks, apart
        world, workers = domains.world, domains.workers
        places = np.array([domains.location(rank) for rank in range(world)])  # [W, levels]
        strides = [prod(workers[level + 1 :]) for level in range(len(workers))]
        levels = [level for level, number in enumerate(workers) if number > 1]
        stays, sender, receiver, self._own = [], [], [], []
        first = 0
        for level in levels:
            regions = np.arange(prod(workers[: level + 1])) * strides[level]  # a rank of each, with place 0 inside it
            of_region = places[regions, level]
            on_the_way = places[:, level:] @ np.array(strides[level:])  # [W]
            behind = places[:, level + 1 :] @ np.array(strides[level + 1 :], dtype=np.int64)
            outer = regions - of_region * strides[level]
            sender.append(outer + on_the_way[:, None])
            receiver.append(regions + behind[:, None])
            stays.append(places[:, level][:, None] == of_region)
            self._own.append(first + np.arange(world) // strides[level])
            first += len(regions)
        nodes = holders.rank_node[:: holders.etp_size]
        crosses = [nodes[one] != nodes[other] for one, other in zip(sender, receiver, strict=True)]
        self._inter = np.hstack(crosses).astype(np.int64)  # [W, copies]
        self._local = np.hstack(stays).astype(np.int64)
        # The tokens that stay inside a node are the same on all of its devices, up to the first level: a node counts as
        # often as it has devices, and so do they.
        weight = max(holders.num_devices // workers[levels[0]], 1)
        # NumPy multiplies matrices of integers without BLAS; these are exact in float64.
        self._kept = np.hstack([of * (1.0 if n == 0 else weight) for n, of in enumerate(stays)])
        self.device_node = holders.device_node
        if len(levels) > 1:
            ranks = np.unique(holders.rank_device, return_index=True)[1] // holders.etp_size
            self.device_node = np.unique(places[ranks, levels[0]], return_inverse=True)[1]

    def by_expert(self, counts: np.ndarray) -> np.ndarray:
        """Returns the rows for each expert, int64 [..., E]."""
        return self._chunks(counts).sum(-2)[..., -self._experts :]

    def on_device(self, counts: np.ndarray, beside: int = 0) -> np.ndarray:
        """Returns what stays off the links for each sample on each device, by position."""
        holders, copies = self._holders, self._copies(counts)
        if beside:
            copies = self._with_beside(copies, np.arange(len(copies))[:, None], beside)
        kept = (copies.astype(np.float64) @ self._kept.T).astype(np.int64)  # [R, B, W] of each part on each rank
        of_holders = sum(
            kept[ranks][:, :, ranks // holders.etp_size] for ranks in holders.ranks.T
        )  # [holders, B, holders]
        on_device = np.zeros((of_holders.shape[0] * of_holders.shape[1], holders.num_devices), np.int64)
        on_device[:, holders.holder_device] = of_holders.reshape(len(on_device), -1)
        return on_device

    def volumes(self, counts: np.ndarray, here: np.ndarray, there: np.ndarray, beside: int) -> tuple[Volume, Volume]:
        """Returns the rows of a pass that are sent in dispatch, and in combine."""
        copies = self._copies(counts)
        dispatched = self._volume(copies, here)
        return dispatched, self._volume(self._with_beside(copies, here, beside) if beside else copies, there)

    def _volume(self, copies: np.ndarray, rank: np.ndarray) -> Volume:
        rank = rank // self._holders.etp_size
        inter, local = int((copies * self._inter[rank]).sum()), int((copies * self._local[rank]).sum())
        return Volume(inter, int(copies.sum()) - inter - local, local)

    def _chunks(self, counts: np.ndarray) -> np.ndarray:
        return counts.reshape(*counts.shape[:-1], self._num_chunks, -1)

    def _copies(self, counts: np.ndarray) -> np.ndarray:
        return self._chunks(counts).sum(-2)[..., : -self._experts]

    def _with_beside(self, copies: np.ndarray, rank: np.ndarray, beside: int) -> np.ndarray:
        """Returns the copies with what goes beside: each token has a copy on its own rank, too."""
        copies = copies.copy()
        for own in self._own:
            places = np.broadcast_to(own[rank // self._holders.etp_size][..., None], (*copies.shape[:-1], 1))
            others = np.take_along_axis(copies, places, -1) if self._apart else 0
            np.put_along_axis(copies, places, others + beside, -1)
        return copies
