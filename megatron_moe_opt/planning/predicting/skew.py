"""Uneven routing: by how much the busiest rank, node or expert domain exceeds the mean.

A rank computes what arrives at it, and the busiest one decides. What an all-to-all takes depends on the links: where
every rank has its own, on the busiest rank; where the ranks of a node share one, on the busiest node, as long as a rank
that has the link to itself is not slower than that. So it is with experts, where the ranks of a node share processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import floordiv

from megatron_moe_opt.planning.costs.bus_bandwidth import EVERY_RANK, ONE_RANK
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.costs.curves import CostCurve
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.domains import ExpertDomains


def link_sharing(cluster: Cluster) -> float:
    """Returns how much faster a rank sends to another node while the others of its node do not; 1: not measured."""
    curves = [cluster.curves.get((Kind.SEND_RECEIVE, name)) for name in (EVERY_RANK, ONE_RANK)]
    if None in curves:
        return 1.0
    size = min(points[-1][0] for points in curves)
    every, one = (CostCurve(points).seconds(size) for points in curves)
    return max(1.0, every / one)


def most_uneven_layer(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns the rows of each rank in the layer whose busiest rank has the largest part of them.

    Args:
        rows: of each rank's layers, in the layers' order.

    Returns:
        Empty where ranks have not equally many layers: those of one are not to be told from those of another.
    """
    if not rows or not rows[0] or len({len(of_rank) for of_rank in rows}) > 1:
        return ()
    return max(zip(*rows, strict=True), key=lambda of_layer: max(of_layer) / (sum(of_layer) or 1.0))


def rows_as_even(rows: Sequence[int], cluster: Cluster) -> int:
    """Returns how many rows every rank of an expert-parallel group would have in a layer that takes as long as one with
    these rows, for who chooses by one number of them.

    Args:
        rows: that the experts of each rank of the group get. The world's other groups are taken to have the same.
    """
    mean = sum(rows) / len(rows)
    if not mean:
        return 0
    of_world = [0] * len(cluster.world.nodes)
    for group in cluster.world.layout.groups("ep"):
        for rank, of_rank in zip(group, rows, strict=True):
            of_world[rank] = of_rank
    skew = Skew(max(rows) / mean, of_world, cluster)
    return round(mean * max(skew.exchanged, skew.computed()))


class Skew:
    """The rows of one layer on the ranks of a cluster."""

    def __init__(self, imbalance: float, rank_rows: Sequence[float], cluster: Cluster) -> None:
        """
        Args:
            imbalance: rows that the busiest rank computes, over the mean.
            rank_rows: rows that each rank of the world computes, in any unit; empty: not known, and `imbalance` is
                taken for nodes and regions too.
        """
        world = cluster.world
        self._imbalance, self._cluster = imbalance, cluster
        mean = sum(rank_rows) / len(rank_rows) if rank_rows else 0.0
        self._rows = [rows / mean for rows in rank_rows] if mean and len(rank_rows) == len(world.nodes) else []

    @cached_property
    def exchanged(self) -> float:
        """Returns the factor by which messages of an even all-to-all would have to grow for it to take as long as this
        uneven one.
        """
        nodes = self._cluster.world.nodes
        if not self._rows or all(len({nodes[rank] for rank in group}) == 1 for group in self._groups):
            return self._imbalance
        return self._of_nodes(self._imbalance, self._rows, link_sharing(self._cluster))

    def computed(self, domains: ExpertDomains | None = None) -> float:
        """Returns how many rows of every rank, over the mean, would make the experts take as long.

        Args:
            domains: whose ranks share their rows; None: experts stay where they are.
        """
        rows = self._rows if domains is None else self._shared(domains, domains.levels - 1)
        busiest = self._imbalance if domains is None else self.of_regions(domains, domains.levels - 1)
        return self._of_nodes(busiest, rows, self._cluster.compute_sharing) if rows else busiest

    def of_regions(self, domains: ExpertDomains, level: int) -> float:
        """Returns the rows of the busiest region over the mean, of the regions into which the domains of the levels
        down to `level` cut an expert-parallel group.
        """
        if not self._rows:
            return self._imbalance if any(domains.domains(outer) > 1 for outer in range(level + 1)) else 1.0
        return max(self._shared(domains, level))

    def _of_nodes(self, busiest: float, rows: Sequence[float], sharing: float) -> float:
        """Returns what the busiest rank, or the busiest node, makes of something that a rank alone does `sharing` times
        faster.

        Args:
            rows: of each rank of the world, over the mean.
        """
        nodes: dict[int, list[float]] = {}
        for node, of_rank in zip(self._cluster.world.nodes, rows, strict=True):
            nodes.setdefault(node, []).append(of_rank)
        busiest_node = max(sum(of_node) / len(of_node) for of_node in nodes.values())
        return min(busiest, max(busiest_node, busiest / sharing))

    def _shared(self, domains: ExpertDomains, level: int) -> list[float]:
        """Returns the rows of each rank of the world, where a region's ranks share theirs; empty where not known."""
        shared = list(self._rows)
        for group in self._groups if shared else ():
            regions: dict[tuple[int, ...], list[int]] = {}
            for place, rank in enumerate(group):
                where = domains.location(place)[: level + 1]
                regions.setdefault(tuple(map(floordiv, where, domains.sizes)), []).append(rank)
            for ranks in regions.values():
                mean = sum(self._rows[rank] for rank in ranks) / len(ranks)
                for rank in ranks:
                    shared[rank] = mean
        return shared

    def hidden(self, domains: ExpertDomains, exchange: float, experts: float) -> float:
        """Returns the seconds of a pass's experts in which tokens travel: those of other ranks of the node, which share
        its link.

        Where tokens travel between nodes only, the ranks of a node do so in groups of their own that nothing keeps in
        step. Links are shared one after the other, so that r ranks take turns: one computes while the next one's tokens
        are on their way. Of L for one way of all their tokens and C for all their experts, C / s alone, a pass takes

            max(2 L, L / r + max(L + C / s, L / r + C))     and not 2 L + C.

        Args:
            exchange: L.
            experts: C.
        """
        ranks = link_sharing(self._cluster)
        apart = domains.domains(0) > 1 and all(domains.domains(level) == 1 for level in range(1, domains.levels))
        if not apart or domains.levels == 1 or ranks == 1.0:
            return 0.0
        share, alone = exchange / ranks, experts / self._cluster.compute_sharing
        return 2 * exchange + experts - max(2 * exchange, share + max(exchange + alone, share + experts))

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        return self._cluster.world.layout.groups("ep")
