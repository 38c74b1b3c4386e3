"""One step of a layer's dispatch and combine, or of its pipeline, recorded op by op, beside its prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_moe_opt.cli.bench.measured_layer import shape_of
from megatron_moe_opt.cli.bench.recorded_step import record_step
from megatron_moe_opt.cli.bench.run import check
from megatron_moe_opt.cli.console import report_console, say
from megatron_moe_opt.cli.ranks import begin, megatron_process_group
from megatron_moe_opt.cli.report.timeline_files import check_timeline_files, timelines_table, write_timelines
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
from megatron_moe_opt.planning.choosing.choice import check_choice
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_passes import PASSES
from megatron_moe_opt.planning.predicting.mpmoe import costs_of
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.schedules.mpmoe import HOPS
from megatron_moe_opt.schedules.schedule import Op
from megatron_moe_opt.schedules.timeline import Timeline, one_after_another
from megatron_moe_opt.systems.mpmoe import MPMOE
from megatron_moe_opt.topology.domains import levels_of_layout
from megatron_moe_opt.variants import split_variant


@dataclass(frozen=True)
class StepTimelines:
    """The passes of one step on one rank, by name; without experts that travel beside them."""

    rank: int
    measured: Mapping[str, Timeline]
    predicted: Mapping[str, Timeline] | None
    """Predicted timelines of the same schedules; None without a profile."""

    def joined(self, name: str) -> dict[str, Timeline]:
        """Returns what there is, predicted first, the passes one after another under `name`."""
        kinds = {"predicted": self.predicted, "measured": self.measured}
        return {kind: one_after_another(name, passes) for kind, passes in kinds.items() if passes is not None}


def layer_timeline(settings: LayerSettings, rank: int | None, files: Sequence[Path]) -> StepTimelines:
    """Records on the current ranks; rank 0 prints the table and writes the files. All ranks get the answer.

    Args:
        settings: of dispatch alone or of mpmoe, with one dispatcher besides the baseline. Its `steps` are recorded, and
            of them the median one is shown.
        rank: whose timeline; None: the rank whose schedules took longest in that step.

    Raises:
        ConfigurationError: settings that cannot work, before anything runs.
    """
    world = begin()
    check_timeline_files("--output", files, [("--profile", settings.profile)])
    if rank is not None and rank >= world:
        raise ConfigurationError(f"--rank {rank} is not one of the {world} ranks of this run: choose 0 to {world - 1}")
    cluster = check(settings)
    settings = settings.on(world)
    costs = None if cluster is None else _costs(settings, cluster)
    with megatron_process_group() as device:
        with parallel_layer(settings.tp, settings.ep, settings.expert_tp, settings.seed):
            step = _record(settings, device, rank)
        if costs is not None:
            predicted = {name: cluster.simulate(timeline.schedule, costs) for name, timeline in step.measured.items()}
            step = replace(step, predicted=predicted)
        if dist.get_rank() == 0:
            _report(step, settings, files)
    return step


def _costs(settings: LayerSettings, cluster: Cluster) -> Callable[[Op], float]:
    """Returns a function of an op that gives the seconds which the ops of the settings' schedules cost.

    Raises:
        ConfigurationError: a curve of mpmoe's is missing.
    """
    if settings.dispatch_only:
        return cluster.costs
    _, options = split_variant(_variant(settings), settings.profile)
    world = cluster.world
    workers = levels_of_layout(world.layout, world.nodes) if HOPS in options.ways else ()
    layer = replace(settings.workload(), workers=workers)
    check_choice([(MPMOE, options)], layer, cluster)
    return costs_of(LayerOnCluster(layer, cluster), options.ways[0], MPMOE.domains(options, workers))


def _record(settings: LayerSettings, device: torch.device, rank: int | None) -> StepTimelines:
    """Returns the recorded step. A collective call over the world; the same answer on every rank."""
    from megatron_moe_opt.integration.measuring.under_test import layers_under_test

    layer = layers_under_test(settings, device)[_variant(settings)]
    for _ in range(settings.warmup):
        layer.observed_step()
    recorded = record_step(layer, settings.steps, device, rank)
    names = PASSES if settings.dispatch_only else ("forward", "backward")
    return StepTimelines(recorded.rank, dict(zip(names, recorded.schedules, strict=True)), None)


def _variant(settings: LayerSettings) -> str:
    (variant,) = (name for name in settings.dispatchers if name != ALLTOALL)
    return variant


def _report(step: StepTimelines, settings: LayerSettings, files: Sequence[Path]) -> None:
    console = report_console(160)
    say(console, f"{shape_of(settings)}; rank {step.rank}")
    console.print(timelines_table(_variant(settings), step.predicted, step.measured))
    write_timelines(step.joined(f"{_variant(settings)}, rank {step.rank}"), files, console)
