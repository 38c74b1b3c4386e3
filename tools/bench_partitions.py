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
from typing import Any

from megatron_moe_opt.planning.choosing.equal_times import fewest_of_equal
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.mpmoe import HOPS
from megatron_moe_opt.schedules.mpmoe import PARTITIONS
from megatron_moe_opt.systems.mpmoe import MPMOE, MpmoeOptions
from tools.bench_points import LONG, POINTS, SHAPES, Point, limits
from tools.papers.published import head, row
from tools.points import found_at, run

VARIANTS = tuple(f"mpmoe:{count}:{HOPS}" for count in PARTITIONS)


@dataclass
class Found:
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
    def seconds(self) -> dict[str, float]:
        """The median of each variant's rounds."""
        return {name: statistics.median(rounds) for name, rounds in self.rounds.items()}

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def regret(self) -> float:
        """How much longer than the fastest the chosen takes, in parts."""
        return self.seconds[self.chosen] / self.seconds[self.fastest] - 1

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
    predicted = {candidate.variant: candidate for candidate in found if candidate.variant in VARIANTS}
    chosen = fewest_of_equal([(candidate.seconds, candidate.parts, name) for name, candidate in predicted.items()])
    seconds = {name: candidate.seconds for name, candidate in predicted.items()}
    return Found(rounds, seconds, chosen, max(limits(workload, cluster)))


def rows(point: Point, content: Mapping[str, Any]) -> Iterator[str]:
    """Yields the row of a point."""
    found = Found(**content)
    cells = (f"{found.seconds[name] * 1e3:.0f} ({found.predicted[name] * 1e3:.0f})" for name in VARIANTS)
    partitions = found.chosen.split(":")[1]
    yield row(
        f"{point.routing}, {point.tokens}", *cells, partitions, f"{found.regret:.1%}", f"{found.limit * 1e3:.0f}",
        f"{found.over_limit:.2f}",
    )  # fmt: skip


def table(out: Any) -> Iterator[str]:
    """Yields the tables of the points that are there."""
    all_found: list[Found] = []
    for shape in SHAPES:
        there = [(one, found) for one in POINTS if one.shape == shape and (found := found_at(out, one)) is not None]
        if there:
            yield f"\n**{shape}**\n"
            counts = [f"{count}: measured (predicted), ms" if count == 1 else str(count) for count in PARTITIONS]
            yield from head("routing, tokens a rank", *counts, "chosen", "regret", "limit, ms", "fastest over it")
        for point, content in there:
            yield from rows(point, content)
            all_found.append(Found(**content))
    if not all_found:
        return
    regrets = [one.regret for one in all_found]
    errors = sorted(error for one in all_found for error in one.errors)
    long = [one.over_limit for one in all_found if one.seconds[one.fastest] >= LONG]
    yield ""
    yield from head("", "found", "asked for")
    for most, asked in ((0.05, "90 %"), (0.1, "")):
        yield row(f"regret at most {most:.0%}", f"{sum(one <= most for one in regrets)} of {len(regrets)}", asked)
    yield row("regret in the mean, and the most", f"{statistics.mean(regrets):.1%}, {max(regrets):.1%}", "")
    off = f"{statistics.median(errors):.1%}, {errors[int(0.9 * (len(errors) - 1))]:.1%}"
    yield row("all predictions off by, at the median and the 90th percentile", off, "")
    yield row("fastest at most 1.3 times the limit", f"{sum(one <= 1.3 for one in long)} of {len(long)}", "all")


def main() -> int:
    """Runs the points that are missing and prints the tables."""
    return run("tools.bench_partitions", __doc__.splitlines()[0], POINTS, time_one, rows, table)


if __name__ == "__main__":
    sys.exit(main())
