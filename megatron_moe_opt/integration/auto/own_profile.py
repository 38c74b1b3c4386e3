"""What moves cost here, measured by the training run itself, where `auto` is given neither profile nor plan.

It is kept beside the checkpoint and read at the next start, as long as nothing that times depend on has changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_moe_opt.dispatchers.say import say
from megatron_moe_opt.errors import ConfigurationError, reason
from megatron_moe_opt.gpu_settings import gpu_settings
from megatron_moe_opt.integration.layer.configured_workload import type_of_rows
from megatron_moe_opt.integration.measuring.domain_moves import num_domain_groups
from megatron_moe_opt.integration.measuring.measure import Sizes, measure, room_beside
from megatron_moe_opt.integration.measuring.provenance import machine
from megatron_moe_opt.integration.training_arguments import checkpoint_folder
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.planning.costs.cluster import EXPERT, OLDER, ROW, TYPE, Cluster, Facts
from megatron_moe_opt.planning.costs.differences import differences
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.runtime.engine.collectives import device_of
from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.topology.agreement import found_by_first, known_to_all
from megatron_moe_opt.topology.nodes import node_name, number_nodes
from megatron_moe_opt.versions import software

FILE_NAME = "moe-opt-cluster.json"
MOST_NAMED = 4
"""The number of hosts that are named in the file; more are told by a hash."""
LINES = 4
"""The number of lines of progress that are printed while it measures."""


@dataclass(frozen=True)
class OwnProfile:
    """The costs of this cluster, measured or read from a file."""

    cluster: Cluster
    source: str
    """Where the costs are from, in words."""


def check_groups() -> None:
    """Refuses, with ConfigurationError, a model in other process groups than Megatron makes, in which it measures."""
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigurationError(
            f"--moe-token-dispatcher-type {AUTO} measures in the process groups that Megatron makes, and this model "
            "was given others: give --moe-opt-profile FILE, or name a dispatcher"
        )


def own_profile(config: Any, workloads: Sequence[LayerWorkload], seconds: float) -> OwnProfile:
    """Measures, or reads what was measured before: on rank 0, which alone reads and writes. A collective call over the
    world, between optimizer steps.

    Args:
        config: Megatron's TransformerConfig.
        workloads: of all MoE layers of the job, the same on all ranks. The largest of unlike ones is measured.
        seconds: to measure for.
    """
    layer = max(workloads, key=lambda one: (one.hidden * one.ffn, one.experts))
    is_grouped = config.moe_grouped_gemm and not getattr(config, "moe_use_legacy_grouped_gemm", False)
    fused = {"moe_permute_fusion": config.moe_permute_fusion, "moe_grouped_gemm": is_grouped}
    # From megatron-core 0.20 on; it pads the rows of each expert. Layers with the operation fuser are not measured.
    if getattr(config, "moe_use_grouped_tensor", False) and not config.use_transformer_engine_op_fuser:
        fused["moe_use_grouped_tensor"] = True
    widths = layer.hidden, layer.ffn * layer.etp
    sizes = Sizes(*widths, type_of_rows(config), layer.workers, layer.local_experts, fused=fused)
    device = device_of(dist.group.WORLD)
    room = room_beside(device, number := num_domain_groups(sizes.workers))
    if room is not None and room < 0:  # a rank that ran out of memory would leave the others in a collective
        say(AUTO, f"GPUs have no memory for the {number} process groups of expert domains: what uses them is not tried")
        sizes = replace(sizes, workers=())
    facts = facts_of_run(sizes, layer, device) | {"--moe-opt-profile-seconds": f"{seconds:g}"}
    folder = checkpoint_folder()
    file = None if folder is None else folder / FILE_NAME
    kept = found_by_first(lambda: _read(file, facts), dist.group.WORLD)
    if isinstance(kept, Cluster):
        say(AUTO, f"costs of moves here are those that were measured before, in {file}")
        return OwnProfile(kept, str(file))
    if kept is not None:
        say(AUTO, kept)
    with failure_board.told():
        cluster = measure(sizes, seconds, device, _progress(seconds))
    cluster = replace(cluster, measured_for=facts)
    if dist.get_rank() == 0:
        for warning in cluster.warnings:
            say(AUTO, warning)
        _write(file, cluster)
    return OwnProfile(cluster, "what was just measured")


def facts_of_run(sizes: Sizes, layer: LayerWorkload, device: torch.device) -> dict[str, str | int]:
    """Returns what the times depend on, by names that the user knows. A collective call over the world."""
    nodes = number_nodes(known_to_all(node_name()))
    of_machine = {name: fact for name, fact in machine(device).items() if name != "name"}
    return {
        "nodes": len(set(nodes)),
        "nodes of ranks": _short(list(map(str, nodes)), "ranks"),
        "--tensor-model-parallel-size": parallel_state.get_tensor_model_parallel_world_size(),
        "--context-parallel-size": parallel_state.get_context_parallel_world_size(),
        "--pipeline-model-parallel-size": parallel_state.get_pipeline_model_parallel_world_size(),
        "--expert-model-parallel-size": layer.ep,
        "--expert-tensor-parallel-size": layer.etp,
        ROW: sizes.hidden,
        EXPERT: sizes.ffn_hidden,
        TYPE: sizes.dtype,
        "--moe-router-topk": layer.topk,
        "--num-experts": layer.experts,
        **{f"--{name.replace('_', '-')}": str(is_on) for name, is_on in sizes.fused.items()},
        "levels of the network": ",".join(map(str, sizes.workers)) or "none",
        **of_machine,
        **(gpu_settings() if device.type == "cuda" else {}),
        **software(),
    }


def _short(names: Sequence[str], what: str) -> str:
    if len(names) <= MOST_NAMED:
        return ",".join(names)
    digest = hashlib.sha256(",".join(names).encode()).hexdigest()
    return f"{len(names)} {what} ({digest[:12]})"


def _read(file: Path | None, facts: Facts) -> Cluster | str | None:
    """Returns what was measured for a run like this; or why the file does not serve, in words; None: no file."""
    if file is None or not os.path.exists(file):
        return None
    try:
        cluster = Cluster.load(file)
    except ConfigurationError as error:
        return f"{file} cannot be used ({error}), and is written anew"
    if OLDER in cluster.warnings:
        return f"{file} is not used: {OLDER}"
    listed = differences(facts, cluster.measured_for)
    return cluster if listed is None else f"{file} was measured for another run: {listed}"


def _write(file: Path | None, cluster: Cluster) -> None:
    if file is None:
        say(AUTO, "what was measured is not kept: there is no --save, nor --load, with a local folder to keep it in")
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        cluster.save(file)
    except (OSError, ConfigurationError) as error:
        say(AUTO, f"what was measured is not kept: {reason(error)}")
        return
    say(AUTO, f"what was measured is kept in {file}")


def _progress(seconds: float) -> Any:
    """Says how far it is, a few times, on rank 0."""
    said = 0

    def progress(done: int, of: int, what: str) -> None:
        nonlocal said
        if done * LINES >= said * of:
            said += 1
            say(AUTO, f"measuring what moves cost here, for {seconds:g} s at most: part {done + 1} of {of}, {what}")

    return progress
