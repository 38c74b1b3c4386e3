"""A `Cluster` that was not measured: the curves of a layout's groups, from the description of a known cluster.

All curves follow from where a group's ranks are. Over each level of the network a rank sends a part of what it sends to
all, and the levels work at once, so that the slowest decides:

    seconds(size) = max over levels of first + further * (peers - 1) + size * peers / ranks / (bandwidth * efficiency)

with the peers that this rank reaches over the level's links, of a group of so many ranks. That is MoNTA's eq. 8 and 9
for groups on one level. The runtime sends every row directly to its rank in all collectives, so that all have the same
curve. Where a level's link is shared, all GPUs that share it are taken to send at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.gpu_settings import demands_one_queue
from megatron_moe_opt.planning.costs.cluster import OURS, STOCK, Cluster, ExpertGemm, Points, World
from megatron_moe_opt.planning.costs.curves import CostCurve, Costs
from megatron_moe_opt.planning.costs.domain_curves import KINDS, profile_name, realisable_groups
from megatron_moe_opt.planning.costs.known_clusters import Fabric, KnownCluster
from megatron_moe_opt.planning.training.step_costs import PP_NEIGHBOURS
from megatron_moe_opt.row_format import ELEMENT_BYTES
from megatron_moe_opt.schedules import parm
from megatron_moe_opt.schedules.groups import EP, EXPERT_TP, JOINT_GROUP, TP
from megatron_moe_opt.schedules.pipeline import ChunkBytes
from megatron_moe_opt.schedules.schedule import Kind, Op
from megatron_moe_opt.topology.layouts import JOINT_ROLES, REPLICA_ROLES, Layout, Role

SIZES = tuple(2**power for power in range(14, 35, 2))
"""The bytes of the points of a curve, besides those that efficiencies were published for: 16 KiB to 16 GiB."""
GEMM_ROWS = tuple(2**power for power in range(4, 21, 2))
GEMM_LAUNCH = 10e-6
"""Seconds that an expert takes without rows: the launches of its kernels. Assumed."""
PERMUTES = 4
"""How often a rank copies its rows besides what schedules have: permute and unpermute, forward and backward."""
MEMORY_REACHED = 0.8
"""The part of the memory bandwidth that reading weights reaches, as MoNTA's Table 8 has it for copies."""


@dataclass(frozen=True)
class _Place:
    """Where the peers of a rank are."""

    peers: tuple[int, ...]
    """The peers that a rank reaches over the links of each level, the innermost level first."""
    ranks: int
    """Number of ranks in the group."""


def describe(
    known: KnownCluster, layout: Layout, hidden: int, ffn: int, dtype: str = "bf16", replicated: bool = True
) -> Cluster:
    """Returns what a profile of this layout on such a cluster would hold.

    Args:
        hidden, ffn: of the expert whose time is given; ffn of one rank's shard.
        replicated: whether TP ranks may hold the same tokens: Parm's SAA is for these alone, and takes long to play.

    Raises:
        ConfigurationError: ranks that do not fill the cluster's nodes alike, or EP groups that no levels of equal
            workers make up.
    """
    levels = known.levels(layout.world)
    workers = levels_of_ep(known, layout)
    moves = dict.fromkeys((Kind.OFFLOAD, Kind.PREFETCH), known.host_bandwidth) | {Kind.COPY: known.copy_bandwidth}
    curves: dict[tuple[Kind, str | None], Points] = {
        (kind, None): tuple((size, size / bandwidth) for size in SIZES) for kind, bandwidth in moves.items()
    }
    gathered = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    groups: dict[str, tuple[tuple[Role, ...], tuple[Kind, ...]]] = {
        EXPERT_TP: (("expert-tp",), gathered),
        TP: (("tp",), gathered),
        "cp": (("cp",), gathered),
        "dp": (REPLICA_ROLES, gathered),
        "expert-dp": (("expert-dp",), gathered),
        JOINT_GROUP: (JOINT_ROLES, (Kind.ALL_TO_ALL,)),
        EP: (("ep",), (Kind.ALL_TO_ALL,)),
        PP_NEIGHBOURS: (("pp",), (Kind.ALL_GATHER,)),
    }
    for name, (roles, kinds) in groups.items():
        members = layout.groups(*roles, unit=_unit(levels))
        if len(members[0]) > 1:
            if name == PP_NEIGHBOURS:
                members = tuple(pair for group in members for pair in pairwise(group))
            points = _slowest(levels, _places(levels, members), in_rings=name in ("dp", "expert-dp"))
            curves |= {(kind, name): points for kind in kinds}
    for level, ranks in realisable_groups(workers):
        place = _place_of_domains(levels, layout, workers, level, ranks)
        curves |= {(kind, profile_name(kind, workers, level, ranks)): _slowest(levels, [place]) for kind in KINDS}
    permutes = tuple((size, PERMUTES * size / known.copy_bandwidth) for size in SIZES)
    cluster = Cluster(
        World(_nodes(layout.world, levels[0][0]), layout.tp, layout.cp, layout.ep, layout.expert_tp),
        curves,
        dict(known.slowdown),
        known.overhead,
        expert_gemm=_expert_gemm(known, hidden, ffn, dtype),
        local_work=dict.fromkeys((STOCK, OURS), permutes),
        host={"described as": known.title},
        one_queue=demands_one_queue(layout.tp, layout.cp, known.capability),
    )  # fmt: skip
    return _with_saa(cluster) if replicated else cluster


@cache
def _nodes(world: int, ranks: int) -> tuple[int, ...]:
    """Returns the node of each rank: one tuple for all layouts of a search."""
    return tuple(rank // ranks for rank in range(world))


def levels_of_ep(known: KnownCluster, layout: Layout) -> tuple[int, ...]:
    """Returns the workers of each network level of the EP groups, the slowest level first.

    Raises:
        ConfigurationError: groups that lie on the levels unevenly, or see KnownCluster.levels.
    """
    levels = known.levels(layout.world)
    joined = [ranks for ranks, _ in levels]
    found = set()
    for group in layout.groups("ep", unit=_unit(levels)):
        # Ranks of the group in one unit of each level, from the whole group inwards.
        counts = [[len(group)]]
        for ranks in reversed(joined[:-1]):
            counts.append(list(Counter(rank // ranks for rank in group).values()))
        if any(len(set(of_level)) > 1 for of_level in counts):
            raise ConfigurationError(
                f"--ep {layout.ep}: its ranks {_short(group)} lie on nodes of {joined[0]} GPUs unevenly: choose a size "
                "that fills nodes, or divides them"
            )
        found.add((*(of_level[0] for of_level in counts), 1))
    if len(found) > 1:
        raise ConfigurationError(
            f"--ep {layout.ep}: some of its groups lie on other levels of the network than others: choose a size that "
            "fills nodes, or divides them"
        )
    (sizes,) = found
    return tuple(outer // inner for outer, inner in pairwise(sizes) if outer > inner) or (1,)


def _short(group: Sequence[int]) -> str:
    return f"{group[0]}, {group[1]}, ... {group[-1]}"


def _unit(levels: Sequence[tuple[int, Fabric]]) -> int:
    """Returns the ranks of a unit of all levels but the outermost: groups that are the same moved by as many, or by a
    multiple, lie on the network alike.
    """
    return levels[-2][0] if len(levels) > 1 else 1


def _places(levels: Sequence[tuple[int, Fabric]], groups: Iterable[Sequence[int]]) -> set[_Place]:
    """Returns the places of all ranks of all groups."""
    members = np.array([*groups])
    number, size = members.shape
    group = np.arange(number)[:, None]
    reached = [np.ones(members.shape, dtype=np.int64)]  # by each rank in its unit of a level, itself counted
    for ranks, _ in levels:
        units = members // ranks * number + group  # another group's are others
        reached.append(np.bincount(units.ravel())[units])
    peers = [outer - inner for inner, outer in pairwise(reached)]
    _, different = np.unique(sum(of_level * size**level for level, of_level in enumerate(peers)), return_index=True)
    return {_Place(tuple(int(of_level.flat[one]) for of_level in peers), size) for one in different}


def _place_of_domains(
    levels: Sequence[tuple[int, Fabric]], layout: Layout, workers: Sequence[int], level: int, ranks: int
) -> _Place:
    """Returns the place of groups of so many ranks at one level of an EP group: it
    reaches all others over that level.
    """
    stride = 1
    for inner in workers[level + 1 :]:
        stride *= inner
    ep = layout.first_group("ep")
    return max(_places(levels, [ep[: stride * ranks : stride]]), key=lambda place: place.peers[::-1])


def _slowest(levels: Sequence[tuple[int, Fabric]], places: Iterable[_Place], in_rings: bool = False) -> Points:
    """Returns the points of the slowest of the ranks at these places and of the levels that they use, at every size.

    Args:
        in_rings: as the collectives of NCCL, in which the ranks of a group that are inside a unit of a level share
            what crosses to others; else each row goes straight to its rank, as ours do.
    """
    curves = []
    for place in places:
        sharers = inside = 1
        for (joined, fabric), peers in zip(levels, place.peers, strict=True):
            if peers:
                bandwidth = fabric.bandwidth / (sharers if fabric.shared else 1)
                crossing = peers / place.ranks
                if in_rings:
                    crossing = 1 - 1 / place.ranks if inside == 1 else crossing / inside
                moved = CostCurve.from_efficiency(bandwidth, fabric.efficiencies, crossing)
                curves.append((moved, fabric.first + fabric.further * (peers - 1)))
            sharers = joined
            inside += peers
    published = {size for _, fabric in levels for size, _ in fabric.efficiencies if size > 1}
    sizes = sorted(published.union(SIZES))
    return tuple((size, max(moved.seconds(size) + latency for moved, latency in curves)) for size in sizes)


def _expert_gemm(known: KnownCluster, hidden: int, ffn: int, dtype: str) -> ExpertGemm:
    """Returns the time of an expert that computes as fast as the device's products or, with few rows, as its
    memory reads the weights.
    """
    speed = known.device.peak_flops * known.device.efficiency
    reading = 2 * hidden * ffn * ELEMENT_BYTES[dtype] / (MEMORY_REACHED * known.memory_bandwidth)

    def points(passes: int) -> Points:
        """Returns the points of the forward pass alone, or of forward and backward, which takes twice as long."""
        return tuple(
            (rows, passes * (GEMM_LAUNCH + max(4 * rows * hidden * ffn / speed, reading))) for rows in GEMM_ROWS
        )

    return ExpertGemm(hidden, ffn, dtype, points(1), points(3))


def _with_saa(cluster: Cluster) -> Cluster:
    """Returns the cluster with what Parm's combine_and_gather takes, as the simulator plays it; none without TP."""
    world, costs = cluster.world, cluster.costs
    if world.tp == 1 or (Kind.ALL_TO_ALL, JOINT_GROUP) not in cluster.curves:
        return cluster
    points = tuple((size, _saa_seconds(size, world, costs, cluster)) for size in SIZES)
    return replace(cluster, saa=points)


def _saa_seconds(size: int, world: World, costs: Costs, cluster: Cluster) -> float:
    """Returns the seconds of combine_and_gather where as many rows come back from every EP peer; without the reorder,
    which has a curve of its own.
    """
    own = -(-size // (world.expert_tp * world.ep))
    phases = [ChunkBytes(own, own * world.tp)] * world.ep
    schedule = parm.combine_and_gather(0, phases, world.expert_tp)
    exchanges = max(world.ep - 1, 1)

    def cost(op: Op) -> float:
        if op.kind is Kind.ALL_TO_ALL:  # a part of the peers each: all of them together have the latency once
            return costs(op) - costs.curve(op).latency * (1 - 1 / exchanges)
        return costs(op) if op.kind is not Kind.COPY or op.size else 0.0

    return cluster.simulate(schedule, cost).seconds
