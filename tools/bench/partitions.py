"""Does the profile alone choose the number of partitions? The points of tools/bench/forty_points.py and as many with
smaller experts beside longer rows, on links that make up for a pause no faster than by a third.

    python -m tools.bench.partitions --out partitions            all that are not there yet (root: netbox)
    python -m tools.bench.partitions --out partitions --table    the tables of what is there

At each point `mpmoe` by hops runs in 1 to 8 partitions, in interleaved rounds, and what the profile chooses of them is
held against the fastest. Links of the other benchmark pass a full bucket at once after a pause, so that under uneven
routing more partitions, which pause more often, are faster there than bytes and bandwidth allow (docs/netbox.md).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_moe_opt.planning.costs.cluster import Cluster
from tools.bench.forty_points import IN_PARTITIONS, SHAPES, Point, Shape, layer, partitions_by_profile, points_of
from tools.bench.judged_points import (
    PartitionsFound,
    PartitionsJudged,
    judged_by_shape,
    off_by,
    part,
    row_of_partitions,
    table_of_partitions,
)
from tools.bench.netbox_runs import Links, run
from tools.markdown_rows import head, row

PEAK = 1.3
SMALL_EXPERTS = (
    Shape(Links("50mbit", "400mbit", 1), layer(512, 1536, 8, 4, ep=2), (96, 128, 192, 256)),
    Shape(Links("50mbit", "400mbit", 2), layer(384, 1280, 8, 4, ep=2, expert_tp=2), (64, 96, 128, 192)),
    Shape(Links("50mbit", "400mbit", 2), layer(320, 640, 16, 6, ep=4), (64, 96, 128, 192)),
    Shape(Links("50mbit", "400mbit", 2), layer(448, 1344, 8, 2, ep=2, expert_tp=2), (96, 128, 192, 256)),
    Shape(Links("50mbit", "400mbit", 1, nodes=4), layer(416, 1248, 8, 2, ep=4), (96, 128, 192, 256)),
)
"""Shapes whose experts take less beside what links do, as an expert gets fewer rows."""
POINTS = [
    replace(point, shape=replace(shape, links=replace(shape.links, peak=PEAK)))
    for shape in (*SMALL_EXPERTS, *SHAPES)
    for point in points_of(shape)
]


def time_one(point: Point, cluster: Cluster, device: Any) -> PartitionsFound:
    """Returns what partitions take at a point, and what is predicted. A collective call over the world."""
    from megatron_moe_opt.cli.bench.balance import routing_balance
    from megatron_moe_opt.cli.bench.predicted import workload_of
    from megatron_moe_opt.cli.bench.run import time_rounds
    from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
    from megatron_moe_opt.integration.measuring.under_test import layers_under_test
    from megatron_moe_opt.topology.domains import levels_of_layout

    one, world = point.shape.layer, cluster.world
    settings = replace(one, tokens=point.tokens, routing=point.routing, dispatchers=IN_PARTITIONS)
    with parallel_layer(one.tp, one.ep, one.expert_tp, one.seed):
        layers = layers_under_test(settings, device)
        del layers[settings.baseline]
        rounds = time_rounds(layers, settings, device)
        balance = routing_balance(settings, device)
    workload = workload_of(settings, balance, levels_of_layout(world.layout, world.nodes))
    return PartitionsFound(rounds, *partitions_by_profile(workload, cluster))


def judge(content: Mapping[str, Any]) -> PartitionsJudged:
    """Returns what a point's file says."""
    return PartitionsJudged(PartitionsFound(**content))


def rows(point: Point, content: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is printed of a point that has just ended."""
    yield row_of_partitions(point, judge(content))


def table(out: Path) -> Iterator[str]:
    """Yields the tables of the points that are there."""
    judged: list[PartitionsJudged] = []
    for shape, of_shape in judged_by_shape(out, POINTS, judge):
        yield f"\n**{shape}**\n"
        yield from table_of_partitions(of_shape)
        judged += (one for _, one in of_shape)
    if not judged:
        return
    regrets = [one.regret_of_partitions for one in judged]
    yield ""
    yield from head("", "found", "asked for")
    for most, asked in ((0.05, "90 %"), (0.1, "")):
        yield row(f"regret at most {most:.0%}", part(regrets, most), asked)
    yield row("regret in the mean, and the most", f"{statistics.mean(regrets):.1%}, {max(regrets):.1%}", "")
    off = off_by(error for one in judged for error in one.errors_of_partitions)
    yield row("all predictions off by, at the median and the 90th percentile", off, "")


def main() -> int:
    """Runs the points that are missing and prints the tables."""
    return run("tools.bench.partitions", __doc__.splitlines()[0], POINTS, time_one, rows, table)


if __name__ == "__main__":
    sys.exit(main())
