"""Does the profile alone choose the number of partitions? The forty points of tools/bench_points.py, on links that make
up for a pause no faster than by a third.

    python -m tools.bench_partitions --out partitions            all that are not there yet (root: netbox)
    python -m tools.bench_partitions --out partitions --table    the tables of what is there

At each point `mpmoe` by hops runs in 1 to 8 partitions, in interleaved rounds, and what the profile chooses of them is
held against the fastest. Links of the other benchmark pass a full bucket at once after a pause, so that under uneven
routing more partitions, which pause more often, are faster there than bytes and bandwidth allow (docs/netbox.md).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_moe_opt.planning.costs.cluster import Cluster
from tools.bench_points import (
    IN_PARTITIONS,
    POINTS,
    SHAPES,
    Judged,
    Point,
    head_of_partitions,
    off_by,
    part,
    partitions_by_profile,
    rows_of_partitions,
)
from tools.papers.published import head, row
from tools.points import found_at, run

PEAK = 1.3
ON_SMOOTH_LINKS = {shape: replace(shape, links=replace(shape.links, peak=PEAK)) for shape in SHAPES}
SMOOTH_POINTS = [replace(one, shape=ON_SMOOTH_LINKS[one.shape]) for one in POINTS]


@dataclass
class Found:
    """What a point has found. Seconds are of a step, on the slowest rank."""

    rounds: dict[str, list[float]]
    """Seconds of every round, by variant."""
    in_partitions: dict[str, float]
    """Seconds that each of IN_PARTITIONS was predicted to take."""
    partitions: str
    """Which of these the profile alone chooses."""
    point: str = ""
    """The point's name, in a file."""


def time_one(point: Point, cluster: Cluster, device: Any) -> Found:
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
        layers = layers_under_test(settings, one.ep, device)
        del layers[settings.baseline]
        rounds = time_rounds(layers, settings, device)
        balance = routing_balance(settings, one.ep, device)
    workload = workload_of(settings, one.ep, balance, levels_of_layout(world.layout, world.nodes))
    return Found(rounds, *partitions_by_profile(workload, cluster))


def rows(point: Point, content: Mapping[str, Any]) -> Iterator[str]:
    """Yields the row of a point."""
    yield from rows_of_partitions(point, Judged(Found(**content)))


def table(out: Path) -> Iterator[str]:
    """Yields the tables of the points that are there."""
    judged: list[Judged] = []
    for shape in ON_SMOOTH_LINKS.values():
        points = [one for one in SMOOTH_POINTS if one.shape == shape]
        there = [(one, found) for one in points if (found := found_at(out, one)) is not None]
        if there:
            yield f"\n**{shape}**\n"
            yield from head_of_partitions()
            for point, content in there:
                yield from rows(point, content)
                judged.append(Judged(Found(**content)))
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
    return run("tools.bench_partitions", __doc__.splitlines()[0], SMOOTH_POINTS, time_one, rows, table)


if __name__ == "__main__":
    sys.exit(main())
