"""What a layer takes whose rows go through their experts in partitions, on any way (MPMoE, section IV-B)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from megatron_moe_opt.planning.costs.cluster import OURS
from megatron_moe_opt.planning.costs.link_bytes import LinkBytes
from megatron_moe_opt.planning.predicting.expert_migration import travelling
from megatron_moe_opt.planning.predicting.hops import HopSeconds
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.partitioned_rows import (
    activation_bytes,
    held_more,
    hop_partitions,
    hop_row_bytes,
    partitions,
    row_bytes,
)
from megatron_moe_opt.planning.predicting.prediction import HeldMore, Prediction
from megatron_moe_opt.schedules import parm
from megatron_moe_opt.schedules.hops import HopStages
from megatron_moe_opt.schedules.memory_reuse import NONE, STRATEGIES, Restore
from megatron_moe_opt.schedules.mpmoe import (
    HOPS,
    JOINT,
    ROWS,
    SHARED_ROWS,
    backward,
    by_rows,
    forward,
    jointly,
    token_shares,
)
from megatron_moe_opt.schedules.partition_rows import (
    INPUT_GRADIENTS,
    INPUTS,
    OUTPUT_GRADIENTS,
    OUTPUTS,
    Partition,
    RowBytes,
)
from megatron_moe_opt.schedules.pipeline import Stage, Stages
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op
from megatron_moe_opt.topology.domains import ExpertDomains, stationary


@dataclass(frozen=True)
class PartitionedLayer:
    """A layer's rows in partitions, and the way that they go."""

    way: str
    strategy: str
    """How partitions share memory."""
    domains: ExpertDomains | None
    """The domains in which experts travel; None: none does."""
    costs: Callable[[Op], float]
    """Returns the seconds of an op of the pipeline."""
    parts: Sequence[Partition]
    row: RowBytes
    stages: Stages
    own: int | None
    """The rows that this rank packs, where they are not as many as it computes."""
    holds: int = 1
    """The number of ranks whose experts this rank computes."""

    def held_more(self, layer: LayerOnCluster) -> HeldMore:
        """Returns what a GPU holds besides what it holds under stock."""
        more = held_more(layer.workload, len(self.parts), self.strategy, self.own)
        return more if self.domains is None else replace(more, of_others=layer.held_bytes_of_others(self.domains))

    @classmethod
    def of(
        cls,
        layer: LayerOnCluster,
        count: int,
        way: str,
        strategy: str = NONE,
        domains: ExpertDomains | None = None,
        chunks: int = 1,
    ) -> PartitionedLayer:
        """Cuts a layer's rows into partitions, and each of these into chunks, by rows. Raises ConfigurationError as
        `costs_of` does.
        """
        one, holds = layer.workload, 1 if domains is None else prod(domains.sizes)
        costs = costs_of(layer, way, domains)
        if way == HOPS:
            hops_in = domains or stationary(one.workers)
            computed = one.rows_of(layer.skew.computed(hops_in)) if holds > 1 else layer.computed
            shares = token_shares(count, strategy)
            parts: Sequence[Partition] = hop_partitions(one, layer.skew, computed, shares, hops_in)
            stages = HopStages(len(one.workers), hops_in.hops, True, one.etp, one.sharers)
            own = sum(part.own for part in parts)
            return cls(way, strategy, domains, costs, parts, hop_row_bytes(one), stages, own, holds)
        sharers = one.sharers if way == SHARED_ROWS else 1
        computed, exchanged = (partitions(one, rows, count, sharers) for rows in (layer.computed, layer.exchanged))
        parts = [replace(part, gathered=other.gathered) for part, other in zip(exchanged, computed, strict=True)]
        stages = jointly(one.etp) if way == JOINT else by_rows(one.ep, one.etp, sharers, chunks)
        packed = sum(part.packed for part in parts) if sharers > 1 else None
        return cls(way, strategy, domains, costs, parts, row_bytes(one), stages, packed)

    def least_seconds(self, layer: LayerOnCluster) -> float:
        """Returns a lower bound on the seconds of the layer.

        Ops of a lane run one after another. Before the first partition is computed it has arrived, and behind the last
        one it goes back. And no op is faster beside others than alone: where two lanes slow each other down, the longer
        one also loses what the other takes from it while both are busy.
        """
        costs, how, chunks = layer.converting(self.costs), STRATEGIES[self.strategy], self.stages.chunks
        whole = sum if chunks == 1 else max  # of lanes that a partition keeps busy: its chunks are in several at once
        again = {
            Restore.RECOMPUTE: (Kind.COMPUTE, Lane.COMPUTE, self.row.token),
            Restore.OFFLOAD: (Kind.ACTIVATE, Lane.COMPUTE, self.row.activations),
        }.get(how.middle)
        saved = ((how.inputs, self.row.token), (how.middle, self.row.middle))
        # Alike are all, or all but those at the ends: a planner asks for bounds by the ten thousand.
        runs = [(part, sum(1 for _ in alike)) for part, alike in groupby(self.parts)]

        def of_experts(kind: Kind, lane: Lane, size: int, part: Partition) -> float:
            return costs(Op(kind, lane, size=part.gathered * size))

        def of_all(kind: Kind, lane: Lane, size: int) -> float:
            return sum(number * of_experts(kind, lane, size, part) for part, number in runs)

        def on_the_way(stages: Sequence[Stage], size: int) -> list[dict[Lane, float]]:
            """Returns for how long one partition of each run keeps lanes busy."""
            found = []
            for rows in (part.bytes(size) for part, _ in runs):
                busy: dict[Lane, float] = {}
                for one in stages:
                    seconds = costs(Op(one.kind, one.lane, size=-(-one.size(rows) // chunks), group=one.group))
                    busy[one.lane] = busy.get(one.lane, 0.0) + seconds * chunks
                found.append(busy)
            return found

        least = layer.local_timeline(OURS, self.own).seconds
        for kind, out, back, host in (
            (Kind.COMPUTE, INPUTS, OUTPUTS, (Kind.OFFLOAD, Lane.D2H)),
            (Kind.GRADIENT, OUTPUT_GRADIENTS, INPUT_GRADIENTS, (Kind.PREFETCH, Lane.H2D)),
        ):
            computed = of_all(kind, Lane.COMPUTE, self.row.token)
            if kind is Kind.GRADIENT and again is not None:  # the first one before gradients have arrived
                computed += of_all(*again) - of_experts(*again, self.parts[0])
            there = on_the_way(self.stages.out(), self.row.of(out))
            home = on_the_way(self.stages.back(), self.row.of(back))
            edges = sum(whole(of_end.values()) for of_end in (there[0], home[-1]))
            offloaded = (size for restore, size in saved if restore is Restore.OFFLOAD)
            bounds = [computed + edges, sum(of_all(*host, size) for size in offloaded)]
            total: dict[Lane, float] = {}
            for of_runs in (there, home):
                for busy, (_, number) in zip(of_runs, runs, strict=True):
                    for lane, seconds in busy.items():
                        total[lane] = total.get(lane, 0.0) + number * seconds
            for lane, seconds in total.items():
                lost, lost_to_it = (1 - rate for rate in layer.best_rates(lane))
                bounds.append(seconds + lost * computed)
                bounds.append(computed + edges + lost_to_it * max(seconds - edges, 0.0))
            least += max(bounds)
        return least * (1 - 1e-9)  # other sums are rounded otherwise

    def prediction(self, layer: LayerOnCluster, variant: str) -> Prediction:
        """Returns what the layer takes.

        What goes on inside nodes runs in a lane of its own beside the all-to-alls between them, as MoNTA's does.
        Experts that travel do so before and after, as in a layer by itself.
        """
        one, links = layer.workload, None
        schedules = [build(self.strategy, self.parts, self.row, self.stages) for build in (forward, backward)]
        alone = [] if self.way in (HOPS, SHARED_ROWS) and one.sharers > 1 else list(layer.edge)
        if self.holds > 1:
            schedules = travelling(one.migration(layer.skew), self.domains, *schedules)
            alone.append(Op(Kind.COPY, Lane.COMPUTE, size=layer.bytes_of_copies(self.holds)))
            links = LinkBytes(layer.cluster, self.domains)
        predicted = layer.prediction(
            variant,
            schedules,
            alone,
            costs=self.costs,
            parts=len(self.parts) * self.stages.chunks,
            local_rows=self.own,
            links=links,
        )
        more, own = self.held_more(layer), activation_bytes(one, one.rows, len(self.parts), self.strategy, self.own)
        return replace(predicted, activation_bytes=own + more.of_others, held_more=more)


def costs_of(layer: LayerOnCluster, way: str, domains: ExpertDomains | None = None) -> Callable[[Op], float]:
    """Returns what the ops of the pipeline take on a way. Raises ConfigurationError where no expert was measured.

    Args:
        domains: of experts that travel, where tokens hop; None: none does.
    """
    if way != HOPS:
        return layer.costs_with(holds=1)
    holds = 1 if domains is None else prod(domains.sizes)
    return HopSeconds(layer, layer.costs_with(holds), domains)


def no_hops(layer: LayerOnCluster) -> str | None:
    """Returns why tokens of a layer cannot hop, or nobody knows what that takes; None: they can."""
    one = layer.workload
    if not one.workers:
        return "the network levels of the expert-parallel group are not known"
    domains, curves = stationary(one.workers), layer.domain_curves
    for level in range(domains.levels):
        ranks = domains.domains(level)
        if ranks > 1 and (Kind.ALL_TO_ALL, level, ranks) not in curves:
            return f"no all-to-all of {ranks} ranks at network level {level} was measured: use moe-opt profile"
    return None


def no_joint(layer: LayerOnCluster) -> str | None:
    """Returns why rows cannot go to all shards of an expert at once, or nobody knows what
    that takes; None: they can.
    """
    if layer.workload.etp == 1:
        return f"experts are whole: its all-to-all is that of mpmoe by {ROWS}"
    if (Kind.ALL_TO_ALL, parm.JOINT_GROUP) not in layer.costs.curves:
        return "no all-to-all over expert parallelism and expert-TP together was measured: moe-opt profile --expert-tp"
    return None


def no_sharing(layer: LayerOnCluster) -> str | None:
    """Returns why the ranks of a TP group cannot share out rows behind the router; None: they can."""
    if layer.workload.tp == 1:
        return "ranks have tokens of their own"
    return None if layer.workload.sharers > 1 else "a router that sees all tokens of a TP group trains another model"
