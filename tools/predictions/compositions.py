"""What compositions take, or would take, by the planner's own simulation: the tables of docs/compositions.md.

    python -m tools.predictions.compositions

Each number is the time of a MoE layer, forward and backward, in a composition's best number of partitions, over that of
the fastest candidate that the planner knows: the least and the largest of the cases. What is not built is a schedule of
the package with ops more, or with ops in parts. Nothing is measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from operator import itemgetter

from megatron_moe_opt.planning.costs.described_cluster import describe, levels_of_ep
from megatron_moe_opt.planning.costs.expert_costs import costs_with_experts
from megatron_moe_opt.planning.costs.known_clusters import KNOWN_CLUSTERS
from megatron_moe_opt.planning.planner import candidates
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.mpmoe import PartitionedLayer, costs_of
from megatron_moe_opt.schedules.groups import TP
from megatron_moe_opt.schedules.issue_order import in_issue_order
from megatron_moe_opt.schedules.memory_reuse import NONE
from megatron_moe_opt.schedules.mpmoe import HOPS, JOINT, ROWS, SHARED_ROWS, backward, forward
from megatron_moe_opt.schedules.schedule import OF_EXPERTS, Kind, Lane, Op, Schedule
from megatron_moe_opt.topology.layouts import Layout

Builder = Callable[[LayerOnCluster, str, int], list[Schedule]]
Cost = Callable[[Op], float]
_NVLINK = ("a800-ib200", "h100-ib400")
PARTITIONS, CHUNKS = (1, 2, 3, 4, 6, 8), (2, 4)
_CHUNKS = re.compile(":c[0-9]")
TOKENS = (4096, 16384)
"""The tokens of a layer on one rank, or on the ranks that hold the same."""
SHAPES = {1: ((768, 8, 3072), (4096, 8, 14336)), 2: ((4096, 8, 14336),), 8: ((2048, 128, 768),)}
"""Hidden size, experts, and their middle size, by top-k: of GPT-2 small as Parm has it, Mixtral and Qwen3-30B-A3B."""
_EIGHT, _WHOLE, _CUT = Layout(32, tp=8, ep=4, expert_tp=8), Layout(8, tp=8, ep=8), Layout(8, tp=4, ep=2, expert_tp=4)
PLACES = {
    "4 NVLink nodes, cut": tuple((cluster, _EIGHT) for cluster in _NVLINK),
    "4 PCIe nodes, cut": (("parm-b", Layout(16, tp=4, ep=4, expert_tp=4)),),
    "1 PCIe node, cut": (("parm-a", _CUT),),
    "1 PCIe node, whole": (("pcie", _WHOLE),),
}
"""Known clusters, and whether experts are cut. All TP ranks hold the same tokens."""
SHARED = {"DeepSeek-V2-Lite": (2048, 64, 1408, 6, 2816), "DeepSeek-V3": (7168, 256, 2048, 8, 2048)}
"""Hidden size, experts, their middle size, top-k, and the middle size of the shared experts."""


def layer_on(cluster: str, layout: Layout, tokens: int, topk: int, shape: tuple[int, int, int]) -> LayerOnCluster:
    """Returns a layer in bf16 whose TP ranks hold the same tokens, on a known cluster."""
    (hidden, experts, ffn), known = shape, KNOWN_CLUSTERS[cluster]
    own, workers = ffn // layout.expert_tp, levels_of_ep(known, layout)
    sizes = (tokens, hidden, own, ffn != 4 * hidden, experts, topk, 2, 16, layout.ep, layout.expert_tp, layout.tp)
    return LayerOnCluster(LayerWorkload(*sizes, workers=workers), describe(known, layout, hidden, own))


def passes(layer: LayerOnCluster, way: str, count: int, shared: int | None = None) -> list[Schedule]:
    """Returns forward and backward of `mpmoe` by a way, as its dispatcher runs them.

    Args:
        shared: bytes of the tokens that shared experts take beside; None: there are none.
    """
    cut = PartitionedLayer.of(layer, count, way)
    return [build(NONE, cut.parts, cut.row, cut.stages, shared) for build in (forward, backward)]


def gathered(layer: LayerOnCluster, way: str, count: int) -> list[Schedule]:
    """Returns `passes` with an AllGather over TP of the rows that each partition has brought back, in the place of S1's
    AllGather of the tokens. In a node it takes the lane of the links between ranks, which are the same.
    """
    one = layer.workload
    size = -(-one.tokens // count) * one.row_bytes * one.topk
    lane = Lane.INTRA if len(set(layer.cluster.world.nodes)) > 1 else Lane.INTER
    costs = layer.converting(costs_of(layer, way))
    return [_gathered(schedule, Op(Kind.ALL_GATHER, lane, size=size, group=TP), costs, layer)
            for schedule in passes(layer, way, count)]  # fmt: skip


def _gathered(schedule: Schedule, gather: Op, costs: Cost, layer: LayerOnCluster) -> Schedule:
    """Returns the schedule with the op `gather` behind each partition's last op; ops of a lane in the order
    in which they could begin.
    """
    spans = layer.cluster.simulate(schedule, costs).spans
    ops = [(span.start, index, span.op) for index, span in enumerate(spans)]
    for chunk, last in {op.chunk: index for index, op in enumerate(schedule.ops)}.items():
        ops.append((spans[last].end, len(ops), replace(gather, chunk=chunk, waits_for=(last,))))
    ops.sort(key=itemgetter(0, 1))
    place = {index: new for new, (_, index, _) in enumerate(ops)}
    moved = [replace(op, waits_for=tuple(place[other] for other in op.waits_for)) for *_, op in ops]
    return replace(schedule, ops=in_issue_order(moved)[1])


def least(layer: LayerOnCluster, way: str, build: Builder, edge: bool, costs: Cost | None = None) -> float:
    """Returns the seconds of a layer in its best number of partitions.

    Args:
        build: makes forward and backward in so many partitions.
        edge: whether S1's AllGathers stand before and after.
    """
    alone, costs = layer.edge if edge else (), costs or costs_of(layer, way)
    return min(layer.prediction("", build(layer, way, n), alone, costs=costs).seconds for n in PARTITIONS)


def built(layer: LayerOnCluster, way: str, chunks: Sequence[int] = (1,)) -> float:
    """Returns the seconds of a layer by a way that `mpmoe` has, in its best number of partitions, and of chunks."""
    return min(
        PartitionedLayer.of(layer, number, way, chunks=of_each).prediction(layer, "").seconds
        for number, of_each in product(PARTITIONS, chunks)
    )


def of_replicated_tokens(layer: LayerOnCluster) -> dict[str, float]:
    """Returns the time of each composition over that of the fastest candidate; where it is built itself, of the fastest
    other one.
    """
    split_before = LayerOnCluster(replace(layer.workload, routes_all=False), layer.cluster)
    rows, hops, hops_split_before = built(layer, ROWS), built(layer, HOPS), built(split_before, HOPS)
    # What is known to take longer than these need not be predicted.
    found, _ = candidates(layer.workload, layer.cluster, below=min(rows, hops) * 1.0001)
    best = found[0].seconds

    def of_other(way: str) -> float:
        return built(layer, way) / next(one.seconds for one in found if not one.variant.endswith(way))

    ratios = {
        "`mpmoe:n:shared-rows`, which is built": of_other(SHARED_ROWS),
        "AllGathers behind partitions that hop, which are built: of the time with S1's": hops / hops_split_before,
    }
    if layer.workload.etp == 1:
        return ratios
    inside = built(layer, ROWS, CHUNKS)
    without = next(one.seconds for one in found if not _CHUNKS.search(one.variant))
    return ratios | {
        "`parm`'s S2, partitions by one all-to-all": least(layer, JOINT, gathered, False) / best,
        "`mpmoe:n:c2` and `c4`, which are built": inside / without,
        "the same, of the time of `mpmoe` by rows": inside / rows,
        "`mpmoe:n:joint`, which is built": of_other(JOINT),
    }


def of_shared_experts(layer: LayerOnCluster, ffn: int) -> tuple[float, float]:
    """Returns the time of a layer whose shared experts run as ops of the pipeline, where tokens hop, over the time with
    them before the layer; and over that with the first of their matrix products hidden.
    """
    one, costs = layer.workload, costs_of(layer, HOPS)
    size, shared = one.tokens * one.row_bytes, costs_with_experts(replace(one, experts=one.ep, ffn=ffn), layer.cluster)
    whole = {Kind.SHARED: Kind.COMPUTE, Kind.SHARED_GRADIENT: Kind.GRADIENT}
    alone = sum(shared(Op(kind, Lane.COMPUTE, size=size)) for kind in OF_EXPERTS)

    def both(op: Op) -> float:
        return shared(replace(op, kind=whole[op.kind])) / 2 if op.kind in whole else costs(op)

    without, inside = (
        least(layer, HOPS, passes, True), least(layer, HOPS, partial(passes, shared=size), True, both)
    )  # fmt: skip
    return inside / (without + alone), inside / (without + alone / 3)


def _between(ratios: Sequence[float]) -> str:
    low, high = (f"{end(ratios):.2f}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def tables() -> str:
    """Returns the tables of docs/compositions.md."""
    ratios: dict[str, dict[str, dict[int, list[float]]]] = {}
    for place, clusters in PLACES.items():
        for topk, shapes in SHAPES.items():
            for (cluster, layout), shape, tokens in product(clusters, shapes, TOKENS):
                for name, ratio in of_replicated_tokens(layer_on(cluster, layout, tokens, topk, shape)).items():
                    ratios.setdefault(name, {}).setdefault(place, {}).setdefault(topk, []).append(ratio)
    lines = ["| composition | experts on | top-1 | top-2 | top-8 |", "|---|---|---|---|---|"]
    for name, of_places in ratios.items():
        for place, of_topk in of_places.items():
            lines.append(f"| {' | '.join([name, place, *map(_between, of_topk.values())])} |")
    heading = "| shared experts as ops, which is built | of them before the layer | of their first product hidden |"
    lines += ["", heading, "|---|---|---|"]
    for name, (hidden, experts, ffn, topk, shared) in SHARED.items():
        layout, shape = Layout(32, ep=32), (hidden, experts, ffn)
        layers = (layer_on(one, layout, tokens, topk, shape) for one in _NVLINK for tokens in TOKENS)
        found = zip(*(of_shared_experts(layer, shared) for layer in layers), strict=True)
        lines.append(f"| {' | '.join([name, *map(_between, found)])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
