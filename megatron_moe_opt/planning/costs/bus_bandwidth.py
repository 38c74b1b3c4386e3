"""Bus bandwidth of measured collectives as nccl-tests defines it, beside what a link can carry.

    algbw   bytes over seconds, where the bytes are those of the larger of a rank's two buffers
    busbw   algbw times the part of these bytes that leave, or reach, a rank: (n - 1) / n in an all-to-all, all-gather
            or reduce-scatter among n ranks, all of it in a send

(nccl-tests, doc/PERFORMANCE.md.) Unlike algbw it does not depend on the number of ranks, so that it can be compared
with the links. The peak is the best rate of `send_receive`, in which every rank sends to one other over links of one
kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from megatron_moe_opt.schedules.groups import JOINT_GROUP
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.layouts import JOINT_ROLES, ROLES

if TYPE_CHECKING:
    from megatron_moe_opt.planning.costs.cluster import Cluster, Points, World

INSIDE, EVERY_RANK, ONE_RANK = "intra-node", "inter-node", "inter-node, one rank a node"
"""Roles of the sends that show what links can carry: inside nodes, and between them from all ranks or from one."""
_DOMAINS = re.compile(r"(tokens|experts) of (\d+) ranks at level (\d+) of ([\dx]+)")
_SCATTERING = frozenset({Kind.ALL_TO_ALL, Kind.ALL_GATHER, Kind.REDUCE_SCATTER})


@dataclass(frozen=True)
class Bus:
    """The group and the links that a collective's bytes go over."""

    ranks: int
    """Number of ranks in the group."""
    link: str
    """The slowest kind that the group has: INSIDE, or EVERY_RANK where it has ranks on several nodes."""
    peak: float | None
    """Bytes a second that a rank can send over such links while all do; None: not measured."""

    def bandwidth(self, size: int, seconds: float) -> float:
        """Returns the bus bandwidth in bytes a second, as nccl-tests defines busbw."""
        return size / seconds * (self.ranks - 1) / self.ranks


def bus_of(cluster: Cluster, kind: Kind, group: str | None) -> Bus | None:
    """Returns what is known of a curve's group; None for what is no collective among ranks that are known."""
    ranks = _ranks(cluster.world, group) if group is not None and kind in _SCATTERING else None
    if ranks is None or len(ranks) < 2:
        return None
    link = EVERY_RANK if len({cluster.world.nodes[rank] for rank in ranks}) > 1 else INSIDE
    sends = cluster.curves.get((Kind.SEND_RECEIVE, link))
    return Bus(len(ranks), link, None if sends is None else best_rate(sends))


def best_rate(points: Points) -> float:
    """Returns the highest rate of the points, in bytes a second."""
    return max(size / seconds for size, seconds in points)


def _ranks(world: World, group: str) -> tuple[int, ...] | None:
    """Returns the first group of a role."""
    if group in ROLES:
        return world.layout.first_group(group)
    if group == JOINT_GROUP:
        return world.layout.first_group(*JOINT_ROLES)
    domains = _DOMAINS.fullmatch(group)
    if domains is None:
        return None
    what, number, level = domains[1], int(domains[2]), int(domains[3])
    workers = [int(one) for one in domains[4].split("x")]
    between = prod(workers[level + 1 :]) * (workers[level] // number if what == "tokens" else 1)
    return world.layout.first_group("ep")[: number * between : between]
