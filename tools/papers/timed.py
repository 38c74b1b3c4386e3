"""The papers' ratios, timed on two imitated nodes beside what the model predicts for them.

    python -m tools.papers.timed --out timed            all points that are not there yet, the short list first
    python -m tools.papers.timed --out timed --only 'parm 0[0-7],monta'
    python -m tools.papers.timed --out timed --table    the table of what is there

Layers are timed in interleaved rounds on netbox (root), see tools/bench/netbox_runs.py. Sizes are the papers', scaled
down until a step takes a few seconds at most, but for the largest of Table V; what is compared with a paper is the
ratio of two schedules. FastMoE's, all rows to the experts and back, is stock's; FasterMoE's is in fastermoe.py.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from megatron_moe_opt.cli.profile.run import ProfileSettings
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from tools.bench.netbox_runs import Links, found_at, run
from tools.markdown_rows import head, row
from tools.papers import hybridep as hybridep_numbers
from tools.papers import parm

PROFILE_SECONDS = {2: 45.0, 4: 45.0, 8: 60.0}
"""The seconds to measure a profile for, by ranks of a node. With 15, two processor cores give curves that are off by
half at the sizes below.
"""
STEPS, WARMUP = 5, 1
SAMPLE_LAYERS = 12
"""The layers of NetMoE's routing: the samples of a step come home once, however many there are."""
COMPRESSION = 25.0
"""The paper's setting for SR-based compression: 50 times fewer entries, each with its place."""
FASTERMOE = "fastermoe"
LIMIT = 100
"""The most seconds of a point besides its profile, unless it says more."""


TWO, FOUR, EIGHT = (Links("200mbit", "1600mbit", ranks) for ranks in (2, 4, 8))
DATA_CENTRES = Links("100mbit", "1280mbit", 2)


@dataclass(frozen=True)
class Ratio:
    """How much longer a step takes under one variant than under another."""

    slow: str
    fast: str
    paper: str
    """What the paper has for it, and where."""


@dataclass(frozen=True)
class Point:
    """One run on two nodes."""

    name: str
    links: Links
    layer: LayerSettings
    ratios: tuple[Ratio, ...]
    model: str | None = None
    """The name of NetMoE's model whose routing is replayed through layers without experts; None:
    the point is no such one.
    """
    end_to_end: bool = False
    """Whether the point is of a whole model: its layers have experts and attention, too."""
    limit: int = LIMIT
    """Seconds that the point may take besides its profile."""

    @property
    def variants(self) -> set[str]:
        """All that its ratios name."""
        return {variant for ratio in self.ratios for variant in (ratio.slow, ratio.fast)}

    def profile_settings(self) -> ProfileSettings:
        """Returns what is profiled for it, which serves all points of the same."""
        ranks = self.links.ranks
        layer = self.layer.on(2 * ranks)
        return ProfileSettings(
            layer.tp, 1, layer.ep, layer.expert_tp, layer.hidden, layer.ffn_hidden, layer.dtype, PROFILE_SECONDS[ranks]
        )


@dataclass
class Timed:
    """What a point has found."""

    seconds: dict[str, list[float]]
    """The seconds of each round, by variant."""
    predicted: dict[str, float]
    """Seconds by variant, where there is a prediction."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Variants that were chosen by the profile, by who chooses."""


def _layer(dispatchers: str, tokens: int, hidden: int, ffn: int, experts: int, topk: int, **more: Any) -> LayerSettings:
    names = tuple(dispatchers.split(","))
    return LayerSettings(names, tokens, hidden, ffn, experts, topk, steps=STEPS, warmup=WARMUP, **more)


PARM_COLUMN = "B, 8"
"""The column of Table IV, for testbed B has nodes of four GPUs, as these points."""
PARM_GRID = tuple(product(parm.GROUPS, (128, 256, 512), parm.FACTORS, (128, 256)))
"""The grid of Parm's points: (N_MP, N_ESP), tokens of a rank (B L), k f, and M = H of a shard: Table III's over 8."""
_SPREAD = 43
"""The stride through the grid, which shares no factor with 48: neighbours in the list are far
from each other in the grid.
"""


def _parm() -> Iterator[Point]:
    column = list(parm.TESTBEDS).index(PARM_COLUMN)
    for number in range(len(PARM_GRID)):
        groups, tokens, factor, size = PARM_GRID[number * _SPREAD % len(PARM_GRID)]
        n_mp, n_esp = groups
        experts = 8 // n_esp
        paper = {name: f"{rows[groups][column]:.2f} (Table IV, mean)" for name, rows in parm.TABLE_IV.items()}
        layer = _layer(
            "parm:S1,parm:S2", tokens, size * n_esp, size * n_esp, experts, 1, tp=n_mp, ep=experts, expert_tp=n_esp,
            capacity_factor=min(factor, experts),  # an expert has no more rows than there are tokens
            pad_to_capacity=True, replicated=True,
        )  # fmt: skip
        yield Point(
            f"parm {number:02}: N_MP {n_mp}, N_ESP {n_esp}, B L {tokens}, k f {factor}, M {size * n_esp}",
            FOUR,
            layer,
            (
                Ratio("deepspeed", "parm:S1", paper["S1"]),
                Ratio("deepspeed", "parm:S2", paper["S2"]),
                Ratio("deepspeed", "by Algorithm 1", paper["Parm"]),
                Ratio("deepspeed", "by our model", paper["Parm"]),
            ),
        )


def points() -> list[Point]:
    """Returns all points: the eight first of Parm's and the other papers', their longest last,
    then the rest of Parm's.
    """
    monta = [
        Point(
            f"monta: TP 8, EP 2, {tokens} tokens a rank",
            EIGHT,
            _layer("monta:O1,monta:O2x4,monta:O3x4,deepspeed", tokens, 512, 8, 2, 2, tp=8, ep=2, expert_tp=8),
            tuple(Ratio("deepspeed", one, paper) for one, paper in MONTA.items()),
        )
        for tokens in (32, 64)
    ]
    mpmoe = [
        Point(
            f"mpmoe: {tokens} tokens a rank, H 256, M 1024",
            FOUR,
            _layer("mpmoe:2,mpmoe:4,mpmoe:8", tokens, 256, 1024, 8, 1),
            tuple(Ratio("alltoall", f"mpmoe:{count}", "2.34 over FastMoE, best n (Fig. 10)") for count in (2, 4, 8)),
        )
        for tokens in (512, 1024)
    ]
    over_fastermoe = [
        Point(
            f"mpmoe over fastermoe: {tokens} tokens a rank, H 256, M 1024",
            FOUR,
            _layer("mpmoe:2,mpmoe:4", tokens, 256, 1024, 8, 1),
            (
                Ratio("alltoall", FASTERMOE, "1.41 (Fig. 10, MPMoE over both)"),
                Ratio(FASTERMOE, "mpmoe:2", "1.66, best n (Fig. 10, mean)"),
                Ratio(FASTERMOE, "mpmoe:4", "1.66, best n (Fig. 10, mean)"),
            ),
        )
        for tokens in (512, 1024)
    ]
    domains = "expert-migration:2x2"
    compressed = f"{domains}:r{COMPRESSION:g}"
    hybridep = [
        Point(
            f"hybridep: {tokens} tokens a rank, H 256, experts of 1 MiB",
            DATA_CENTRES,
            _layer(f"{domains},{compressed}", tokens, 256, 512, 4, 2),
            (
                Ratio("alltoall", domains, "1.25 to 2.82, + Migration (section V-D, Table VI)"),
                Ratio("alltoall", compressed, "2.12 over Tutel, 24 MB (Table V, Cluster-M)"),
            ),
        )
        for tokens in (512, 2048)
    ]
    table_5 = [
        Point(
            f"hybridep table 5: {megabytes} MB of rows a rank, experts of 0.36 MB",
            DATA_CENTRES,
            replace(_layer(domains, megabytes * 512, 256, 176, 4, 2), steps=2),  # 2 rows of 1,024 bytes a token
            (Ratio("alltoall", domains, f"{tutel / hybrid:.2f} over Tutel (Table V, Cluster-M)"),),
            limit=LIMIT + 8 * megabytes,
        )
        for megabytes, (tutel, hybrid) in hybridep_numbers.TABLE_V["Cluster-M"].items()
        if megabytes >= 48
    ]
    figure_13 = [
        Point(
            f"hybridep fig. 13: 4 MB of rows a rank, experts of {ffn / 512:g} MiB",
            DATA_CENTRES,
            _layer(",".join(FIGURE_13), 2048, 256, ffn, 4, 2),
            tuple(
                Ratio("alltoall", one, "1.18 to 2.57 over Tutel, 16 MB and 2 to 32 MB (Fig. 13)") for one in FIGURE_13
            ),
        )
        for ffn in (256, 1024, 2048)
    ]
    netmoe = [
        Point(
            f"netmoe: routing as {model} on two nodes",
            FOUR,
            _layer("netmoe", 4 * 96, 512, 1, 32, 2),
            (Ratio("alltoall", "netmoe", "up to 1.67 over FastMoE (Fig. 6)"),),
            model=model,
            limit=limit,
        )
        for model, limit in (("MoE-GPT-S", LIMIT), ("MoE-GPT-L", 10 * LIMIT))
    ]
    end_to_end = [
        replace(
            one,
            name=f"{one.name}, end to end",
            layer=replace(one.layer, ffn_hidden=2 * one.layer.hidden),
            end_to_end=True,
            limit=5 * LIMIT,
        )
        for one in netmoe
    ]
    of_two = [
        replace(
            one,
            name=f"{one.name}, 2 ranks a node",
            links=TWO,
            ratios=(replace(one.ratios[0], paper=FIGURE_9),),
            limit=5 * LIMIT,
        )
        for one in (netmoe[0], end_to_end[0])  # MoE-GPT-L does not end within the limit
    ]
    of_parm = list(_parm())
    others = (*over_fastermoe, *end_to_end, *table_5, *figure_13, *of_two)
    return [*monta, *of_parm[:8], *netmoe, *mpmoe, *hybridep, *others, *of_parm[8:]]


MONTA = {
    "monta:O1": "3.3 at 8K, measured (Fig. 14)",
    "monta:O2x4": "5.7 at 8K (eq. 15)",
    "monta:O3x4": "4.0 at 256K, measured (Fig. 14)",
}
"""The speed-ups that the paper has of a level over its baseline."""
FIGURE_9 = "the fastest of all with 2 and with 4 GPUs a node (Fig. 9)"
FIGURE_13 = ("expert-migration:1x1", "expert-migration:2x1", "expert-migration:2x2")
"""The variants of Fig. 13: domains of which the paper's model, too, chooses."""


# ------------------------------------------------------------------------------------------------------ on the ranks


def time_one(point: Point, cluster: Any, device: Any) -> Timed:
    """Returns what a point takes, and what is predicted for it. A collective call over the world."""
    return (_time_samples if point.model else _time_layer)(point, cluster, device)


def _time_layer(point: Point, cluster: Any, device: Any) -> Timed:
    from megatron_moe_opt.cli.bench.balance import routing_balance
    from megatron_moe_opt.cli.bench.predicted import predict_layer, workload_of
    from megatron_moe_opt.cli.bench.run import time_rounds
    from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
    from megatron_moe_opt.integration.measuring.under_test import layers_under_test
    from megatron_moe_opt.planning.predicting.baselines import deepspeed, fastermoe
    from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
    from megatron_moe_opt.planning.predicting.parm import ParmFits, algorithm_1
    from megatron_moe_opt.topology.domains import levels_of_layout

    nodes = cluster.world.nodes
    settings = point.layer.on(len(nodes))
    with parallel_layer(settings.tp, settings.ep, settings.expert_tp, settings.seed):
        layers = layers_under_test(settings, device)
        if FASTERMOE in point.variants:
            layers[FASTERMOE] = fastermoe_layer(settings, device, point.links.ranks)
        seconds = time_rounds(layers, settings, device)
        balance = routing_balance(settings, device)
    predicted = dict(predict_layer(settings, balance, nodes, cluster).seconds)
    work = workload_of(settings, balance, levels_of_layout(cluster.world.layout, nodes))
    chosen = {}
    if "deepspeed" in settings.dispatchers:
        predicted["deepspeed"] = deepspeed(LayerOnCluster(work, cluster)).seconds
    if FASTERMOE in point.variants:
        predicted[FASTERMOE] = fastermoe(LayerOnCluster(work, cluster), point.links.ranks).seconds
    if "parm:S1" in settings.dispatchers:
        chosen["by Algorithm 1"] = f"parm:{algorithm_1(work, work.tokens, ParmFits.of(cluster))}"
        chosen["by our model"] = min(("parm:S1", "parm:S2"), key=lambda one: predicted[one])
    return Timed({name: list(map(float, one)) for name, one in seconds.items()}, predicted, chosen)


def fastermoe_layer(settings: LayerSettings, device: Any, ranks: int) -> Any:
    """Returns the layer under FasterMoE's schedule with groups of so many ranks, ready for a step."""
    from megatron_moe_opt.integration.measuring.under_test import layer_under_test
    from tools.papers.fastermoe import GROUPS, FasterMoeDispatcher

    under_test = layer_under_test(settings, f"mpmoe:{GROUPS}", device)
    plugged = under_test.layer.token_dispatcher
    plugged.dispatcher = FasterMoeDispatcher(plugged.dispatcher.groups, ranks)
    return under_test


def _time_samples(point: Point, cluster: Any, device: Any) -> Timed:
    import tempfile

    from megatron_moe_opt.planning.planner import candidates
    from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
    from megatron_moe_opt.planning.traces.routing_generator import TABLE5, like_table5
    from tools.bench.samples import SampleSettings, run

    layer, table = point.layer, TABLE5[point.model][2]
    trace = like_table5(table, passes=6, layers=SAMPLE_LAYERS, seed=0, tokens=layer.tokens // 4)
    samples = SampleSettings(
        Path(tempfile.gettempdir()), ("netmoe",), layer.hidden, None, layer.dtype, 3, 4,
        layer.ffn_hidden if point.end_to_end else None,
    )  # fmt: skip
    found = run(samples, trace, device)
    ep, workers = 2 * point.links.ranks, (2, point.links.ranks)
    work = LayerWorkload(
        layer.tokens, layer.hidden, layer.ffn_hidden, False, layer.experts, layer.topk, 4, 16, ep=ep, workers=workers,
        placement_saving=table.reduction,
    )  # fmt: skip
    predicted, _ = candidates(work, cluster)
    rest = attention_seconds(work, layer.tokens // 4, cluster) if point.end_to_end else 0.0
    return Timed(
        {one.dispatcher: list(one.seconds) for one in found},
        {one.variant: one.seconds + rest for one in predicted if one.variant in point.variants},
    )


def attention_seconds(work: Any, length: int, cluster: Any) -> float:
    """Returns what a layer's attention takes, forward and backward, at the rate of the profile's largest expert.

    Args:
        length: tokens of a sample.
    """
    gemm = cluster.expert_gemm
    rows, seconds = (gemm.training or tuple((rows, 3 * one) for rows, one in gemm.points))[-1]
    operations = 3 * 2 * work.tokens * work.hidden * (4 * work.hidden + length)  # half of the scores are masked
    return operations / (3 * gemm.flops(rows) / seconds)


# ------------------------------------------------------------------------------------------------------- the driver


def rows(point: Point, timed: Mapping[str, Any]) -> Iterator[str]:
    """Yields the rows of a point: what was measured, predicted and published of each ratio."""
    seconds, predicted, chosen = timed["seconds"], timed["predicted"], timed["chosen"]
    for ratio in point.ratios:
        fast = chosen.get(ratio.fast, ratio.fast)
        pairs = zip(seconds[ratio.slow], seconds[fast], strict=True)
        measured = statistics.median(slow / quick for slow, quick in pairs)
        model, off = "-", "-"
        if ratio.slow in predicted and fast in predicted:
            expected = predicted[ratio.slow] / predicted[fast]
            model, off = f"{expected:.2f}", f"{expected / measured - 1:+.0%}"
        name = ratio.fast if fast == ratio.fast else f"{ratio.fast}: {fast}"
        yield row(point.name, f"{ratio.slow} / {name}", f"{measured:.2f}", model, off, ratio.paper)


def table(out: Path) -> Iterator[str]:
    """Yields the table of the points that are there."""
    yield from head("point", "ratio", "measured", "predicted for netbox", "off by", "the paper's")
    for point in points():
        if (found := found_at(out, point)) is not None:
            yield from rows(point, found)


def main() -> int:
    """Runs the points that are missing and prints the table."""
    return run("tools.papers.timed", __doc__.splitlines()[0], points(), time_one, rows, table)


if __name__ == "__main__":
    sys.exit(main())
