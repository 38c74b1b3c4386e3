"""What a placement of samples takes by NetMoE's eqs. 1 and 5, which its two stages stand for.

    t = max(alpha_inter + beta_inter s_inter, alpha_intra + beta_intra s_intra)      an all-to-all (eq. 1)
    t(combine of this layer) + t(dispatch of the next)                               a placement (eq. 5)

The two stages (eqs. 6 and 7), which run here, make s_inter of both together least, and then s_intra without changing
it. Where t_inter is the larger in both all-to-alls of their result, eq. 5 is twice alpha_inter and beta_inter times
that least s_inter, and no placement takes less than its t_inter: the result is eq. 5's optimum, whatever alpha and beta
are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_moe_opt.planning.costs.curves import AlphaBeta
from megatron_moe_opt.planning.costs.known_clusters import KnownCluster
from megatron_moe_opt.planning.predicting.placement_volume import Volume


@dataclass(frozen=True)
class LinkSeconds:
    """alpha and beta of the two kinds of links, over what all ranks together send over them: bytes, or tokens."""

    inter: AlphaBeta
    intra: AlphaBeta

    @classmethod
    def of(cls, known: KnownCluster, gpus: int, latencies: bool = True) -> LinkSeconds:
        """Returns the lines, over bytes, of an all-to-all of so many GPUs on several nodes, or data centres, of a known
        cluster.

        Args:
            latencies: False: alpha is 0.
        """
        (inner, inside), *_, (_, outside) = known.levels(gpus)
        node = known.levels(gpus)[-2][0]
        units = gpus // node if outside.shared else gpus
        lines = []
        for fabric, links, peers in ((outside, units, gpus - node), (inside, gpus, inner - 1)):
            alpha = fabric.first + fabric.further * (peers - 1) if latencies else 0.0
            reached = max(part for _, part in fabric.efficiencies)
            lines.append(AlphaBeta(alpha, 1 / (links * fabric.bandwidth * reached)))
        return cls(*lines)

    def __call__(self, volume: Volume) -> tuple[float, float]:
        """Returns t_inter and t_intra of one all-to-all."""
        return self.inter.seconds(volume.inter), self.intra.seconds(volume.intra)


def placement_seconds(volumes: Iterable[Volume], links: LinkSeconds) -> float:
    """Returns the seconds of the all-to-alls that a placement decides (eqs. 1 and 5).

    Args:
        volumes: of the combine of this layer, and of the dispatch of the next, where the samples are placed.
    """
    return sum(max(links(volume)) for volume in volumes)
