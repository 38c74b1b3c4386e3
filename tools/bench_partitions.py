"""Does the profile alone choose the number of partitions? The forty points of tools/bench_points.py, in half an hour.

    python -m tools.bench_partitions --out partitions            all that are not there yet (root: netbox)
    python -m tools.bench_partitions --out partitions --table    the tables of what is there

At each point `mpmoe` by hops runs in 1 to 8 partitions, in interleaved rounds, and what the profile chooses of them is
held against the fastest.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_moe_opt.planning.choosing.equal_times import fewest_of_equal
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.mpmoe import HOPS
from megatron_moe_opt.schedules.mpmoe import PARTITIONS
from megatron_moe_opt.systems.mpmoe import MPMOE, MpmoeOptions
from tools.bench_points import LONG, POINTS, Point, Timed, found_of_shapes, limits, off_by, part
from tools.papers.published import head, row
from tools.points import run

VARIANTS = tuple(f"mpmoe:{count}:{HOPS}" for count in PARTITIONS)


@dataclass
class Found(Timed):
    """What a point has found. Seconds are of a step, on the slowest rank."""

    rounds: dict[str, list[float]]
    """Seconds of every round, by variant."""
    predicted: dict[str, float]
    """Seconds that each variant was predicted to take."""
    chosen: str
    """What the profile chooses."""
    limit: float
    """The largest of the seconds of the links and of the experts: see bench_points.limits."""
    point: str = ""
    """The point's name, in a file."""

    @property
    def regret(self) -> float:
        return self.regret_of(self.chosen, self.seconds)

    @property
    def errors(self) -> list[float]:
        """How far predictions are off, in parts, of each variant."""
        return [abs(self.predicted[name] / seconds - 1) for name, seconds in self.seconds.items()]

    @property
    def over_limit(self) -> float:
        """How many times the limit the fastest takes."""
        return self.seconds[self.fastest] / self.limit


def time_one(point: Point, cluster: Cluster, device: Any) -> Found:
    """Returns what partitions take at a point, and what is predicted. A collective call over the world."""
    from megatron_moe_opt.cli.bench.balance import routing_balance
    from megatron_moe_opt.cli.bench.predicted import workload_of
    from megatron_moe_opt.cli.bench.run import time_rounds
    from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
    from megatron_moe_opt.integration.measuring.under_test import layers_under_test
    from megatron_moe_opt.topology.domains import levels_of_layout

    one, world = point.shape.layer, cluster.world
    settings = replace(one, tokens=point.tokens, routing=point.routing, dispatchers=VARIANTS)
    with parallel_layer(one.tp, one.ep, one.expert_tp, one.seed):
        layers = layers_under_test(settings, one.ep, device)
        del layers[settings.baseline]
        rounds = time_rounds(layers, settings, device)
        balance = routing_balance(settings, one.ep, device)
    workload = workload_of(settings, one.ep, balance, levels_of_layout(world.layout, world.nodes))
    found = MPMOE.candidates(LayerOnCluster(workload, cluster), MpmoeOptions(partitions=PARTITIONS, way=HOPS))
    staying = [candidate for candidate in found if candidate.variant in VARIANTS]  # experts stay, too
    chosen = fewest_of_equal([(candidate.seconds, candidate.parts, candidate.variant) for candidate in staying])
    predicted = {candidate.variant: candidate.seconds for candidate in staying}
    return Found(rounds, predicted, chosen, max(limits(workload, cluster)))


def rows(point: Point, content: Mapping[str, Any]) -> Iterator[str]:
    """Yields the row of a point."""
    found = Found(**content)
    cells = (f"{found.seconds[name] * 1e3:.0f} ({found.predicted[name] * 1e3:.0f})" for name in VARIANTS)
    partitions = found.chosen.split(":")[1]
    yield row(
        f"{point.routing}, {point.tokens}", *cells, partitions, f"{found.regret:.1%}", f"{found.limit * 1e3:.0f}",
        f"{found.over_limit:.2f}",
    )  # fmt: skip


def table(out: Path) -> Iterator[str]:
    """Yields the tables of the points that are there."""
    all_found: list[Found] = []
    counts = [f"{count}: measured (predicted), ms" if count == 1 else str(count) for count in PARTITIONS]
    for shape, there in found_of_shapes(out):
        yield f"\n**{shape}**\n"
        yield from head("routing, tokens a rank", *counts, "chosen", "regret", "limit, ms", "fastest over it")
        for point, content in there:
            yield from rows(point, content)
            all_found.append(Found(**content))
    if not all_found:
        return
    regrets = [one.regret for one in all_found]
    long = [one.over_limit for one in all_found if one.seconds[one.fastest] >= LONG]
    yield ""
    yield from head("", "found", "asked for")
    for most, asked in ((0.05, "90 %"), (0.1, "")):
        yield row(f"regret at most {most:.0%}", part(regrets, most), asked)
    yield row("regret in the mean, and the most", f"{statistics.mean(regrets):.1%}, {max(regrets):.1%}", "")
    off = off_by(error for one in all_found for error in one.errors)
    yield row("all predictions off by, at the median and the 90th percentile", off, "")
    yield row("fastest at most 1.3 times the limit", part(long, 1.3), "all")


def main() -> int:
    """Runs the points that are missing and prints the tables."""
    return run("tools.bench_partitions", __doc__.splitlines()[0], POINTS, time_one, rows, table)


if __name__ == "__main__":
    sys.exit(main())
