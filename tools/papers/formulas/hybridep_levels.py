"""What passes of a layer take on several network levels, in the paper's closed form (HybridEP, sections III and IV).

Each choice of domain sizes takes

    T = sum over passes of Lat_PE + max(n Lat_Ep, max(migration - Lat_PE, 0) + 2 exchange)     (hybridep.py)

with one collective a level, one level after the other, of the volumes that planning/predicting/expert_migration.py
counts. The planner plays the schedules that run instead, which take as long where nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

from megatron_moe_opt.planning.costs.curves import CostCurve
from megatron_moe_opt.planning.costs.domain_curves import KINDS, Curves, curve_of, realisable_groups
from megatron_moe_opt.planning.predicting.expert_migration import (
    DomainChoice,
    MigrationLayer,
    StreamPass,
    all_domains,
    exchange_seconds,
)
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.domains import ExpertDomains
from tools.papers.formulas.hybridep import stream_seconds


@dataclass(frozen=True, kw_only=True)
class TimedPass(StreamPass):
    """One way through a layer whose computation is known."""

    pre_expert_seconds: float = 0.0
    """Seconds of what precedes the experts; in a backward pass, of its gradients."""
    expert_seconds: float = 0.0
    """Seconds of all experts of a GPU."""


def predict(layer: MigrationLayer, workers: tuple[int, ...], curves: Curves) -> tuple[DomainChoice, ...]:
    """Returns what each of `all_domains` takes by the paper's sum, in which experts hide what precedes them.

    Args:
        layer: its passes are TimedPass.
        curves: of the groups of more than one rank. Measured ones, or `link_curves`.

    Raises:
        ConfigurationError: as `all_domains`; or a curve is missing.
    """
    return tuple(DomainChoice(domains, _seconds(layer, domains, curves)) for domains in all_domains(layer, workers))


def _seconds(layer: MigrationLayer, domains: ExpertDomains, curves: Curves) -> float:
    levels, exchange = range(domains.levels), exchange_seconds(layer, domains, curves)
    total = 0.0
    for one in layer.passes:
        migration = sum(
            curve_of(curves, kind, level, domains.sizes[level]).seconds(size)
            for level in levels
            if domains.sizes[level] > 1
            for kind, size in layer.travels(domains, level, one).items()
        )
        total += stream_seconds(one.pre_expert_seconds, one.expert_seconds, migration, exchange)
    return total


@dataclass(frozen=True)
class Link:
    """What a GPU has to send at a level.

    Raises:
        ValueError: a bandwidth that is not positive and finite, or a latency that is negative or not finite.
    """

    bandwidth: float
    """Bytes a second of one GPU: where GPUs share a link, its part of it."""
    latency: float = 0.0
    """Seconds that every message adds; those of a GPU follow one another (pairwise exchange, ring)."""

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth < inf and 0 <= self.latency < inf):
            raise ValueError(f"bandwidth {self.bandwidth} and latency {self.latency} are not those of a link")

    def seconds(self, messages: int, size: float) -> float:
        """Returns the time of so many messages, `size` bytes together."""
        return messages * self.latency + size / self.bandwidth


def link_curves(workers: Sequence[int], links: Sequence[Link]) -> dict[tuple[Kind, int, int], CostCurve]:
    """Returns the curves of every realisable group on given links, one a level: (r - 1) messages,
    (r - 1) / r of the bytes.
    """
    curves = {}
    for level, ranks in realisable_groups(workers):
        link = links[level]
        ends = ((size, link.seconds(ranks - 1, size * (ranks - 1) / ranks)) for size in (1.0, 2.0**60))
        line = CostCurve(tuple(ends))
        curves |= {(kind, level, ranks): line for kind in KINDS}
    return curves


def stock_seconds(layer: MigrationLayer, workers: Sequence[int], links: Sequence[Link]) -> float:
    """Returns the time of all passes with one flat all-to-all over all GPUs, as stock Megatron's: a row for every
    expert of a token.

    The links of all levels are taken to be busy at once: the slowest decides. Experts stay, and their gradients too.
    The layer's passes are TimedPass.
    """
    exchange = max(
        link.seconds(_stock_peers(workers, level), _stock_exchanged(layer, workers, level))
        for level, link in enumerate(links)
    )
    return sum(stream_seconds(one.pre_expert_seconds, one.expert_seconds, 0.0, exchange) for one in layer.passes)


def stock_sent(layer: MigrationLayer, workers: Sequence[int], level: int) -> float:
    """Bytes that a GPU sends over its links of a level in all passes of stock Megatron's all-to-all."""
    return 2 * len(layer.passes) * _stock_exchanged(layer, workers, level)


def _stock_peers(workers: Sequence[int], level: int) -> int:
    """Returns the number of GPUs that a GPU reaches over its links of this level, and over those inside it."""
    return (workers[level] - 1) * prod(workers[level + 1 :])


def _stock_exchanged(layer: MigrationLayer, workers: Sequence[int], level: int) -> float:
    data = layer.tokens * layer.topk * layer.row_bytes
    return data * _stock_peers(workers, level) / prod(workers)
