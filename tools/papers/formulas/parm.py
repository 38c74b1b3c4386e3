"""What Parm's section IV says of its schedules (eqs. 1 to 11): what each sends, and that the baseline takes longest.

Of B L tokens of M elements a rank and E T rows for experts, in bytes b = B L M and e = E T M, a forward pass waits for

    t_B    AG_ESP(b N_ESP) + AR_ESP(e N_ESP) + 2 A2A_EP(e N_ESP)             eq. 1, with AR(x) = RS(x) + AG(x)
    t_D    2 A2A_EP&ESP(e N_ESP)                                             eq. 2, N_MP = 1: S1 and S2 are the same
    t_D1   2 A2A_EP&ESP(e N_ESP / N_MP) + AG_MP(b)                           eq. 11
    t_D2   A2A_EP&ESP(e N_ESP / N_MP) + Overlap(e N_ESP / N_MP)              eq. 7

The paper concludes t_B >= t_D and t_B >= t_D2 from

    A2A_EP&ESP(x) <= AG_ESP(x) + A2A_EP(x)       eq. 3; with RS_ESP in the place of AG_ESP eq. 5
    AG_MP(x) <= A2A_EP&ESP(x)                    eq. 9

of the bytes that a rank sends, which holds of bandwidth alone. Every peer costs latency besides, and EP&ESP has N_ESP
times as many as EP: below some size eq. 3 does not hold (docs/papers/parm.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.costs.curves import CostCurve
from megatron_moe_opt.planning.costs.described_cluster import describe
from megatron_moe_opt.planning.costs.known_clusters import KNOWN_CLUSTERS, Fabric, KnownCluster
from megatron_moe_opt.schedules.groups import EP, EXPERT_TP, JOINT_GROUP, TP
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.layouts import Layout

SIZES = tuple(2.0**power for power in range(6, 35))
"""Bytes at which inequalities are tried."""
ROUNDING = 1e-9

Seconds = Callable[[float], float]
"""Seconds over bytes, as Op.size counts them."""


def _of_one_rank(size: float) -> float:
    """Returns the seconds of a collective in a group of one: none."""
    return 0.0


@dataclass(frozen=True)
class Collectives:
    """The collectives of section IV, each as its seconds over bytes."""

    gather_esp: Seconds
    scatter_esp: Seconds
    exchange_ep: Seconds
    exchange_joint: Seconds
    """The exchange A2A_EP&ESP."""
    gather_mp: Seconds
    overlap: Seconds
    """The overlapped collective Overlap(.), SAA; where N_MP is 1 the exchange alone."""
    n_esp: int
    n_mp: int

    @classmethod
    def of(cls, cluster: Cluster, ep_in_a_node: bool = False) -> Collectives:
        """Takes the collectives from the curves of a cluster, measured or described.

        Args:
            ep_in_a_node: of a described cluster without TP: its expert-TP groups, which lie inside, are taken for EP
                groups, and the other way round (case 3 of section IV-B). All collectives of a group have one curve
                there.
        """
        curves = cluster.costs.curves

        def of(kind: Kind, group: str) -> Seconds:
            curve = curves.get((kind, group))
            return curve.seconds if curve else _of_one_rank

        gather, scatter = of(Kind.ALL_GATHER, EXPERT_TP), of(Kind.REDUCE_SCATTER, EXPERT_TP)
        exchange, n_esp = of(Kind.ALL_TO_ALL, EP), cluster.world.expert_tp
        if ep_in_a_node:
            gather, scatter, exchange, n_esp = exchange, exchange, gather, cluster.world.ep
        joint = of(Kind.ALL_TO_ALL, JOINT_GROUP)
        overlap = CostCurve(cluster.saa).seconds if cluster.saa else joint
        gather_mp = of(Kind.ALL_GATHER, TP)
        return cls(gather, scatter, exchange, joint, gather_mp, overlap, n_esp, cluster.world.tp)

    def t_b(self, tokens: float, rows: float) -> float:
        """Returns t_B, the seconds that the baseline communicates (eq. 1).

        Args:
            tokens, rows: bytes b and e of a rank.
        """
        x = rows * self.n_esp
        reduce = self.scatter_esp(x) + self.gather_esp(x)
        return self.gather_esp(tokens * self.n_esp) + reduce + 2 * self.exchange_ep(x)

    def t_d(self, rows: float) -> float:
        """Returns t_D, the seconds that S1 and S2 communicate where N_MP is 1 (eq. 2)."""
        return 2 * self.exchange_joint(rows * self.n_esp)

    def t_d2(self, rows: float) -> float:
        """Returns t_D2, the seconds that S2 communicates (eq. 7)."""
        x = rows * self.n_esp / self.n_mp
        return self.exchange_joint(x) + self.overlap(x)

    def sides(self, x: float, factor: float = 1.2) -> dict[str, tuple[float, float]]:
        """Returns, by equation, what is to be at most, and of what, with x = e N_ESP bytes. What does not apply is left
        out.

        Args:
            factor: k f = e / b.
        """
        rows, gathered = x / self.n_esp, x * self.n_mp / self.n_esp
        tokens = rows / factor
        found = {
            "3": (self.exchange_joint(x), self.gather_esp(x) + self.exchange_ep(x)),
            "5": (self.exchange_joint(x), self.scatter_esp(x) + self.exchange_ep(x)),
        }
        if self.n_mp == 1:
            return found | {"6": (self.t_d(rows), self.t_b(tokens, rows))}
        return found | {
            "7": (self.overlap(x), self.exchange_joint(x) + self.gather_mp(gathered)),
            "9": (self.gather_mp(x), self.exchange_joint(x)),
            "10": (self.t_d2(rows), self.t_b(tokens, rows)),
        }

    def fails_below(self, equation: str) -> float:
        """Returns the bytes x from which on an inequality holds, to a thousandth; 0 where it does at all sizes."""

        def fails(x: float) -> bool:
            least, most = self.sides(x)[equation]
            return least > most * (1 + ROUNDING)

        below = max((x for x in SIZES if fails(x)), default=0.0)
        above = 2 * below
        while above - below > 1e-3 * above:
            middle = (below + above) / 2
            below, above = (middle, above) if fails(middle) else (below, middle)
        return above


def bandwidth_alone(known: KnownCluster) -> KnownCluster:
    """Returns the cluster of the paper's proofs: nothing takes latency, and lanes do not disturb each other."""

    def fabric(one: Fabric | None) -> Fabric | None:
        return one and Fabric(one.bandwidth, ((1, max(part for _, part in one.efficiencies)),), shared=one.shared)

    links = {name: fabric(getattr(known, name)) for name in ("inside", "between", "far")}
    return replace(known, **links, overhead=0.0, slowdown={})


@cache
def on_known(name: str, n_mp: int, n_esp: int, n_ep: int, alone: bool) -> Collectives:
    """Returns the collectives of a known cluster, on as many GPUs as EP and ESP have ranks; with bandwidth
    alone or with its latencies.
    """
    known = bandwidth_alone(KNOWN_CLUSTERS[name]) if alone else KNOWN_CLUSTERS[name]
    return Collectives.of(describe(known, Layout(n_ep * n_esp, tp=n_mp, ep=n_ep, expert_tp=n_esp), 1024, 1024))


LAYOUTS = tuple(
    (name, n_mp, n_esp, n_ep)
    for name, known in KNOWN_CLUSTERS.items()
    for n_mp, n_esp, n_ep in product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8, 16))
    if n_ep * n_esp > 1
    and not n_ep * n_esp % (n_mp * known.data_centres)
    and known.inside.bandwidth > known.between.bandwidth  # as section IV assumes: HybridEP's PCIe is slower
)
"""The layouts of section IV: known cluster, N_MP, N_ESP, N_EP, in one node and over several."""


def failing(equation: str, alone: bool = True) -> int:
    """Returns how many layouts there are in which an inequality of section IV fails at some size."""
    found = (on_known(*layout, alone) for layout in LAYOUTS)
    return sum(one.fails_below(equation) > 0 for one in found if equation in one.sides(SIZES[0]))
