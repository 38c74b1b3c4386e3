"""What systems that ours are measured against would take for a layer, as the simulator plays it: those of the papers,
and DeepEP, which Megatron's `flex` dispatcher runs on.

For comparison alone: none is a dispatcher here but DeepSpeed-MoE's (`--moe-token-dispatcher-type deepspeed`), and none
is ever chosen. Schedules are those of their publications and sources, on the same costs as all candidates; what their
kernels and message layers take more or less than ours is not in them.

    deepspeed   AllGather(expert-TP), A2A, experts N_MP-fold, AllReduce(expert-TP), A2A (Parm, Fig. 3a)
    fastmoe     A2A, experts, A2A, one after another
    fastermoe   the ranks in groups of four: all messages with one group after another on their way, experts of those
                that have arrived meanwhile, all messages back last (FasterMoE, section 4.2; its default)
    tutel       d equal parts of the rows, d of 1, 2, 4 and 8 as is fastest, sent and returned in the same order
    deepep      a token once over every link, as ours hop, in one kernel: all network levels at once, no copies between
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain
from math import ceil

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.cluster import STOCK
from megatron_moe_opt.planning.costs.domain_curves import curve_of
from megatron_moe_opt.planning.predicting.hops import hop_passes
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.partitioned_rows import hop_partitions
from megatron_moe_opt.planning.predicting.prediction import Prediction
from megatron_moe_opt.schedules.groups import EP, EXPERT_TP, level_of
from megatron_moe_opt.schedules.monta import GATHERED, AllToAllAndGather, even_chunks
from megatron_moe_opt.schedules.pipeline import Pipeline, own_buffer
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Outline
from megatron_moe_opt.schedules.timeline import Timeline
from megatron_moe_opt.topology.domains import stationary

GROUP = 4
"""The ranks of a group of FasterMoE's: the default of its FMOE_FASTER_GROUP_SIZE (github.com/laekov/fastmoe)."""
TUTEL_DEGREES = (1, 2, 4, 8)


def deepspeed(layer: LayerOnCluster) -> Prediction:
    """Predicts DeepSpeed-MoE: every expert-TP peer moves and computes the tokens of all of them; of TP ranks with
    the same tokens each does.
    """
    one = layer.workload
    rows = ceil(one.routed_rows(one.tokens) * layer.skew.exchanged) * one.etp
    moved, tokens = rows * one.row_bytes, one.tokens * one.etp * one.row_bytes
    exchange = [Op(Kind.ALL_TO_ALL, Lane.INTER, size=moved, group=EP)] * (one.ep > 1)
    copy = [Op(Kind.COPY, Lane.COPY, size=moved)]
    gather, scatter = (
        [Op(kind, Lane.INTRA, size=tokens, group=EXPERT_TP)] * (one.etp > 1)
        for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    )
    reduce = [replace(op, size=moved) for op in (*scatter, *gather)]
    forward = [*gather, *exchange, *copy, Op(Kind.COMPUTE, Lane.COMPUTE, size=moved), *reduce, *copy, *exchange]
    backward = [*gather, *exchange, *copy, Op(Kind.GRADIENT, Lane.COMPUTE, size=moved), *copy, *exchange, *scatter]
    return layer.prediction("deepspeed", (), [*forward, *backward], STOCK, local_rows=rows)


def fastmoe(layer: LayerOnCluster) -> Prediction:
    """Predicts FastMoE: rows of all ranks at once, and nothing beside anything else."""
    return _sent_first(layer, "fastmoe", 1)


def tutel(layer: LayerOnCluster) -> Prediction:
    """Predicts Tutel: the fastest of its degrees of pipelining."""
    return min((_sent_first(layer, f"tutel:{degree}", degree) for degree in TUTEL_DEGREES), key=lambda one: one.seconds)


def fastermoe(layer: LayerOnCluster, ranks: int = GROUP) -> Prediction:
    """Predicts FasterMoE: one group of ranks after another, nearest first. Fewer than two groups are `fastmoe`.

    Args:
        ranks: of a group.

    Raises:
        ConfigurationError: the all-to-alls of the network levels were not measured.
    """
    one = layer.workload
    groups = one.ep // ranks
    if groups < 2 or one.etp > 1:
        return replace(fastmoe(layer), variant="fastermoe")
    domains, curves = stationary(one.workers), layer.domain_curves
    home = domains.location(0)
    levels = []
    for group in range(groups):
        there = domains.location(group * ranks + (group == 0))
        levels.append(next(level for level, (a, b) in enumerate(zip(home, there, strict=True)) if a != b))

    def cost(op: Op) -> float:
        if op.kind is not Kind.ALL_TO_ALL:
            return layer.costs(op)
        # The fewest ranks of a level are the nearest to a message or two: a group's ranks are behind one link.
        workers = domains.workers[levels[op.chunk]]
        fewest = next(number for number in range(2, workers + 1) if workers % number == 0)
        crosses = op.size * (1 - 1 / ranks) if op.chunk == 0 else op.size
        curve = curve_of(curves, op.kind, levels[op.chunk], fewest)
        return layer.costs.overhead + curve.seconds(crosses * fewest / (fewest - 1))

    return _sent_first(layer, "fastermoe", groups, cost)


def deepep(layer: LayerOnCluster) -> Prediction:
    """Predicts what DeepEP sends (github.com/deepseek-ai/DeepEP), by the costs of the cluster's own all-to-alls: each
    exchange takes what its slowest network level takes. That it takes multiprocessors from experts which run beside it,
    and may reach more of a link than NCCL does (it publishes 0.9 of 400 Gb/s), is not in it.

    Raises:
        ConfigurationError: experts are cut, or the all-to-alls of the network levels were not measured.
    """
    one = layer.workload
    if one.etp > 1:
        raise ConfigurationError("experts that are cut have no such exchange")
    domains, curves = stationary(one.workers), layer.domain_curves

    def seconds(op: Op) -> float:
        if op.kind is not Kind.ALL_TO_ALL:
            return 0.0
        level = level_of(op.group)
        return layer.costs.overhead + curve_of(curves, op.kind, level, domains.domains(level)).seconds(op.size)

    ways = hop_passes(one, hop_partitions(one, layer.skew, layer.computed, [1], domains))
    at_once = [Timeline.of_times(way, [(0.0, seconds(op)) for op in way.ops]) for way in chain.from_iterable(ways)]
    return layer.played("deepep", at_once)


def baselines(layer: LayerOnCluster) -> tuple[Prediction, ...]:
    """Predicts all that the cluster's measurements cover; `deepspeed` alone where TP ranks hold the same tokens."""
    found = []
    for build in (deepspeed,) if layer.workload.tp > 1 else (deepspeed, fastmoe, fastermoe, tutel, deepep):
        with suppress(ConfigurationError):
            found.append(build(layer))
    return tuple(found)


def _sent_first(
    layer: LayerOnCluster, variant: str, parts: int, costs: Callable[[Op], float] | None = None
) -> Prediction:
    one = layer.workload
    sizes = even_chunks(layer.exchanged * one.row_bytes, one.etp, parts)
    way = AllToAllAndGather(one.ep, one.etp, Lane.COPY, Lane.COPY)
    outlines = [_all_sent_first(variant, parts, way, kind) for kind in (Kind.COMPUTE, Kind.GRADIENT)]
    schedules = [outline.sized(sizes) for outline in outlines]
    return layer.prediction(variant, schedules, layer.edge, STOCK, costs, parts)


@cache
def _all_sent_first(name: str, parts: int, way: AllToAllAndGather, compute: Kind) -> Outline:
    """Builds a pass that sends all parts to the experts, then all back, each as soon as it has been computed."""
    pipeline = Pipeline(own_buffer("rows", part) for part in range(parts))
    for part in range(parts):
        pipeline.through(part, "rows", way.out())
    for part in range(parts):
        pipeline.add(compute, Lane.COMPUTE, part, GATHERED, ["sorted"], ["outputs"])
        pipeline.through(part, "outputs", way.back())
    return pipeline.outline(f"{name}, {parts} part(s)")
