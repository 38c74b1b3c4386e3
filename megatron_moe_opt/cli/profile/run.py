"""`moe-opt profile`, on the ranks that run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_moe_opt.cli.console import progress, report_console, say, say_written
from megatron_moe_opt.cli.profile.curves_table import curves_table, interference_table
from megatron_moe_opt.cli.ranks import begin, megatron_process_group
from megatron_moe_opt.integration.measuring.layer_settings import check_ffn_hidden
from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
from megatron_moe_opt.output_file import check_output_file
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.topology.domains import levels_if_even
from megatron_moe_opt.topology.layouts import Layout, layout_of_run
from megatron_moe_opt.topology.nodes import discover_nodes


@dataclass(frozen=True)
class ProfileSettings:
    """The options that `moe-opt profile` was called with."""

    tp: int
    cp: int
    ep: int | None
    """Expert parallelism; None: as many ranks as expert_tp leaves."""
    expert_tp: int
    hidden: int
    ffn_hidden: int
    dtype: str
    """Type of the rows: fp32 or bf16."""
    seconds: float

    def layout(self, world: int) -> Layout:
        """Returns the groups that these sizes make on `world` ranks.

        Raises:
            ConfigurationError: the option, its value and the way out.
        """
        layout = layout_of_run(world, self.ep, self.expert_tp, tp=self.tp, cp=self.cp)
        check_ffn_hidden(self.ffn_hidden, self.expert_tp)
        return layout


def profile_cluster(settings: ProfileSettings, output: Path) -> Cluster:
    """Measures on the current ranks; rank 0 prints the table and writes `output`.

    Raises:
        ConfigurationError: settings that cannot work, before anything runs.
    """
    world = begin()
    check_output_file("--output", output)
    settings.layout(world)
    with megatron_process_group() as device:
        cluster = measured(settings, device)
        if dist.get_rank() == 0:
            cluster.save(output)
            console = report_console(200)
            console.print(curves_table(cluster))
            console.print(interference_table(cluster))
            for warning in cluster.warnings:
                say(console, f"warning: {warning}")
            say_written(output, console)
    return cluster


def measured(settings: ProfileSettings, device: torch.device) -> Cluster:
    """Returns the measured cluster. A collective call over the world; the same answer on every rank."""
    from megatron_moe_opt.integration.measuring.measure import Sizes, measure  # Megatron warns of much, see `begin`

    layout = settings.layout(dist.get_world_size())
    workers = levels_if_even(layout, discover_nodes().node_of) or (layout.ep,)  # uneven nodes are no levels
    sizes = Sizes(settings.hidden, settings.ffn_hidden, settings.dtype, workers, codec=True)
    with (
        parallel_layer(layout.tp, layout.ep, layout.expert_tp, seed=1, cp=layout.cp),
        progress("measuring", dist.get_rank() == 0) as tell,
    ):
        return measure(sizes, settings.seconds, device, tell)
