"""What dispatchers print while a run goes on: their choices, on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
import torch.distributed as dist

from megatron_moe_opt.gpu_settings import other_settings
from megatron_moe_opt.planning.costs.cluster import EXPERT, RANKS, ROW, TYPE, Cluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.versions import software

_PROFILE = "profile"
"""What speaks of a profile: whichever dispatcher reads it, it is the same."""
_said: set[tuple[str, Hashable]] = set()


def is_first_rank() -> bool:
    """Whether this is rank 0; before there are process groups, every rank is."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(dispatcher: str, line: str, on_any: bool = False) -> None:
    """Prints a line on the first rank, or `on_any` rank that calls it."""
    if on_any or is_first_rank():
        print(f"moe-opt: {dispatcher}: {line}", flush=True)


def say_once(dispatcher: str, choice: Hashable, line: Callable[[], str], on_any: bool = False) -> None:
    """Prints `line()`, as `say` does, when a choice is made for the first time, whichever layer makes it."""
    if (dispatcher, choice) not in _said:
        _said.add((dispatcher, choice))
        say(dispatcher, line(), on_any)


def say_other_settings(dispatcher: str, file: object, measured: Mapping[str, object] | None) -> None:
    """Says on rank 0, on a GPU, that a profile or plan was measured with other settings than this run has."""
    line = other_settings(file, measured) if torch.cuda.is_available() else None
    if line is not None:
        say_once(dispatcher, line, lambda: line)


def say_other_run(file: object, cluster: Cluster, layer: LayerWorkload) -> None:
    """Says on rank 0 that a profile has warnings, or was measured for another layer than this one, on other ranks or
    versions, so that its times may not hold. Does what say_other_settings does, too.
    """
    say_other_settings(_PROFILE, file, cluster.gpu_settings)
    if cluster.warnings:
        listed = "; ".join(cluster.warnings)
        say_once(_PROFILE, (str(file), listed), lambda: f"{file} has curves to be doubted: {listed}")
    here = {
        RANKS: dist.get_world_size(),
        ROW: layer.hidden,
        EXPERT: layer.ffn * layer.etp,
        TYPE: {2: "bf16", 4: "fp32"}.get(layer.element_bytes, "another"),  # fp16 is as long, and computed as fast
        **software(),
    }
    others = cluster.made_otherwise(here)
    if others is not None:
        say_once(
            _PROFILE,
            (str(file), others),
            lambda: (
                f"{file} was measured for another run, and its times may not hold: {others}; measure again with "
                "moe-opt profile"
            ),
        )
