"""Forty points that nothing was tuned on: what `auto` keeps, against stock, every system alone, and what links allow.

    python -m tools.bench.forty_points --out points            all that are not there yet (root: netbox)
    python -m tools.bench.forty_points --out points --table    the tables of what is there

Five layouts and shapes, four sizes, even and Zipf-distributed routing; at each, `auto` plans, tries and settles by
itself, and all that it tried and the two best predicted variants of every system, and of each whose tokens hop, are
timed in interleaved rounds (tools/bench/choice.py). So is `mpmoe` by hops in 1 to 8 partitions, of which the profile
alone chooses, too. Rows are short and many, so that an expert gets 256 and more in the mean: what a step takes on a CPU
however few there are (weights read from memory, Python) is small then. Links are so slow that they are what limits on a
machine of two cores, and not these, which move bytes and compute.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from megatron_moe_opt.cli.profile.run import ProfileSettings
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.planning.choosing.equal_times import fewest_of_equal
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.schedules.mpmoe import HOPS, PARTITIONS
from megatron_moe_opt.systems.expert_migration import NAME as MIGRATION
from megatron_moe_opt.systems.expert_migration import domain_word
from megatron_moe_opt.systems.mpmoe import MPMOE, MpmoeOptions
from tools.bench import judged_points
from tools.bench.judged_points import Found, rows
from tools.bench.layer_limits import alone_and_processors, seconds_of_experts, seconds_of_links
from tools.bench.netbox_runs import Links, run

PROFILE_SECONDS = 45.0
ROUTINGS = ("uniform", "zipf")
STEPS, WARMUP = 4, 1
WHOLE, *_ = IN_PARTITIONS = tuple(f"mpmoe:{count}:{HOPS}" for count in PARTITIONS)
"""Variants of which the profile alone chooses the number of partitions."""


@dataclass(frozen=True)
class Shape:
    """A layout and a layer, at four sizes."""

    links: Links
    layer: LayerSettings
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        one, links = self.layer, self.links
        groups = f"EP {one.ep}" + (f", TP and expert-TP {one.expert_tp}" if one.expert_tp > 1 else "")
        return (
            f"{links.nodes} x {links.ranks} ranks, {links.inter} / {links.intra}, {groups}, hidden {one.hidden}, "
            f"{one.experts} experts of {one.ffn_hidden}, top-{one.topk}"
        )


def layer(hidden: int, ffn: int, experts: int, topk: int, ep: int, expert_tp: int = 1) -> LayerSettings:
    """Returns a layer to time in as many steps as all points have."""
    return LayerSettings(
        (), 1, hidden, ffn, experts, topk, tp=expert_tp, ep=ep, expert_tp=expert_tp, steps=STEPS, warmup=WARMUP
    )


SHAPES = (
    Shape(Links("50mbit", "400mbit", 1), layer(128, 1536, 8, 4, ep=2), (768, 896, 1024, 1280)),
    Shape(Links("50mbit", "400mbit", 2), layer(128, 896, 8, 4, ep=2, expert_tp=2), (320, 384, 448, 512)),
    Shape(Links("50mbit", "400mbit", 2), layer(128, 1024, 8, 4, ep=4), (384, 448, 512, 640)),
    Shape(Links("50mbit", "400mbit", 2), layer(192, 768, 8, 2, ep=2, expert_tp=2), (256, 320, 384, 512)),
    Shape(Links("50mbit", "400mbit", 1, nodes=4), layer(128, 512, 8, 4, ep=4), (320, 384, 448, 512)),
)


@dataclass(frozen=True)
class Point:
    """A size and routing of a shape."""

    shape: Shape
    tokens: int
    routing: str
    limit: int = 420

    @property
    def name(self) -> str:
        return f"{self.shape}: {self.routing}, {self.tokens} tokens a rank"

    @property
    def links(self) -> Links:
        return self.shape.links

    def profile_settings(self) -> ProfileSettings:
        """Returns what is profiled for it, which serves all points of the shape."""
        one = self.shape.layer
        return ProfileSettings(one.tp, 1, one.ep, one.expert_tp, one.hidden, one.ffn_hidden, one.dtype, PROFILE_SECONDS)


def points_of(shape: Shape) -> list[Point]:
    """Returns the points of a shape: each size under each routing."""
    return [Point(shape, tokens, routing) for routing in ROUTINGS for tokens in shape.tokens]


POINTS = [point for shape in SHAPES for point in points_of(shape)]


def time_one(point: Point, cluster: Cluster, device: Any) -> Found:
    """Returns what `auto` keeps at a point, and what all variants take. A collective call over the world."""
    import torch.distributed as dist

    from megatron_moe_opt.cli.bench.balance import routing_balance
    from megatron_moe_opt.cli.bench.predicted import workload_of
    from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
    from megatron_moe_opt.topology.agreement import found_by_first
    from megatron_moe_opt.topology.domains import levels_of_layout
    from tools.bench.choice import measure
    from tools.bench.judged_systems import AutoChooser

    one, world = point.shape.layer, cluster.world

    def save() -> Path:
        file = Path(mkdtemp()) / "cluster.json"
        cluster.save(file)
        return file

    profile = found_by_first(save, dist.group.WORLD)
    workers = levels_of_layout(world.layout, world.nodes)
    uncut = [f"{MIGRATION}:{domain_word((1,) * len(workers))}"] if one.expert_tp == 1 else []  # a single system
    chooser = AutoChooser((*IN_PARTITIONS, *uncut))
    with parallel_layer(one.tp, one.ep, one.expert_tp, one.seed):
        settings = replace(one, tokens=point.tokens, routing=point.routing, profile=profile)
        by_plan, by_trials = measure(settings, cluster, [point.tokens], chooser, device)
        balance = routing_balance(settings, device)
        alone, processors = alone_and_processors(settings, by_trials.best, device)
        wire, inside = seconds_of_links(settings, WHOLE, cluster, device)
        experts = seconds_of_experts(settings, WHOLE, device)
    workload = workload_of(settings, balance, workers)
    return Found(
        by_trials.rounds, *partitions_by_profile(workload, cluster), by_trials.chosen, by_plan.chosen,
        by_plan.predicted, wire, inside, experts, alone, processors,
    )  # fmt: skip


def partitions_by_profile(work: LayerWorkload, cluster: Cluster) -> tuple[dict[str, float], str]:
    """Returns the seconds predicted for each of IN_PARTITIONS, and the one of them that the profile chooses."""
    found = MPMOE.candidates(LayerOnCluster(work, cluster), MpmoeOptions(partitions=PARTITIONS, way=HOPS))
    staying = [candidate for candidate in found if candidate.variant in IN_PARTITIONS]  # experts stay, too
    chosen = fewest_of_equal([(candidate.seconds, candidate.parts, candidate.variant) for candidate in staying])
    return {candidate.variant: candidate.seconds for candidate in staying}, chosen


def table(out: Path) -> Iterator[str]:
    """Yields the tables of the points that are there."""
    yield from judged_points.table(out, POINTS)


def main() -> int:
    """Runs the points that are missing and prints the tables."""
    return run("tools.bench.forty_points", __doc__.splitlines()[0], POINTS, time_one, rows, table)


if __name__ == "__main__":
    sys.exit(main())
