"""MPMoE: rows go through their experts in partitions, as one pipeline, whose partitions may share memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO, BYTES, one_of
from megatron_moe_opt.option_values import PARTITIONS as SEVERAL_PARTITIONS
from megatron_moe_opt.planning.choosing.partition_search import PARTITIONS
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.partitioned_rows import activation_bytes, partitions, row_bytes
from megatron_moe_opt.planning.predicting.prediction import Prediction
from megatron_moe_opt.schedules.mpmoe import NONE, STRATEGIES, backward, forward
from megatron_moe_opt.systems.system import (
    CHOOSES,
    FLAG,
    PREFIX,
    READS,
    Grammar,
    SharedOptions,
    System,
    chosen_by_profile,
    option,
    recomputed_modules,
)

NAME = "mpmoe"
DEFAULT_PARTITIONS = 4


@dataclass(frozen=True)
class MpmoeOptions(SharedOptions):
    """Into how many partitions rows are cut, and how partitions share memory."""

    partitions: int | tuple[int, ...] | str | None = option(
        "partitions",
        SEVERAL_PARTITIONS,
        "parts of the rows that mpmoe runs through the experts as a pipeline; several to choose from; or auto: any of "
        f"{PARTITIONS[0]} to {PARTITIONS[-1]} (default: {DEFAULT_PARTITIONS})",
        auto=CHOOSES,
    )
    memory_reuse: str | None = option(
        "memory-reuse",
        one_of(*STRATEGIES, AUTO),
        "whether mpmoe's partitions share buffers, and how backward gets back what they overwrite: S1 offloads, S2 "
        "communicates expert inputs again, S3 recomputes what experts save, S4 does both of the latter "
        f"(default: {NONE})",
        auto=CHOOSES,
    )
    activation_budget: int | None = option(
        "activation-budget",
        BYTES,
        "the most that activations of a layer may take (MPMoE, eq. 2), such as 512MiB, where mpmoe or auto chooses",
        auto=READS,
    )

    @property
    def tunes_partitions(self) -> bool:
        """Whether `mpmoe` chooses its partitions, its memory reuse or both."""
        return len(self.partition_counts) > 1 or self.memory_reuse == AUTO

    @property
    def partition_counts(self) -> tuple[int, ...]:
        """Of `mpmoe`, to choose from; one where the user chose."""
        if self.partitions == AUTO:
            return PARTITIONS
        if isinstance(self.partitions, tuple):
            return self.partitions
        return (self.partitions or DEFAULT_PARTITIONS,)

    @property
    def memory_strategies(self) -> tuple[str, ...]:
        """Of `mpmoe`, to choose from; one where the user chose."""
        return tuple(STRATEGIES) if self.memory_reuse == AUTO else (self.memory_reuse or NONE,)

    def check(self) -> None:
        """Refuses, with ConfigurationError, several numbers of partitions, or auto, without a profile."""
        if isinstance(self.partitions, tuple) and len(self.partitions) > 1:
            self.needs_profile("partitions")
        self.auto_needs_profile("partitions", "memory_reuse")


def _build(groups: Any, options: MpmoeOptions, config: Any) -> Any:
    from megatron_moe_opt.dispatchers.mpmoe import MpmoeDispatcher
    from megatron_moe_opt.dispatchers.partitioning import partitioning_of
    from megatron_moe_opt.integration.layer.configured_workload import layer_workload

    return MpmoeDispatcher(groups, partitioning_of(options, groups, layer_workload(config, groups)))


def _attach(layer: Any, options: MpmoeOptions) -> None:
    from megatron_moe_opt.integration.layer.mpmoe_layer import pipeline_experts

    pipeline_experts(layer, options)


def _check(config: Any, options: MpmoeOptions, arguments: Any) -> None:
    """Refuses what does not fit experts that run partition by partition, and what they save."""
    if config.moe_router_padding_for_quantization:
        raise ConfigurationError(
            f"--moe-router-padding-for-quantization pads an expert's rows before {FLAG} mpmoe cuts them: drop it, and "
            "the experts pad each partition themselves"
        )
    if options.activation_budget is not None and not options.tunes_partitions:
        raise ConfigurationError(
            f"{PREFIX}activation-budget {options.activation_budget} has nothing to choose: add {PREFIX}partitions auto "
            f"or {PREFIX}memory-reuse auto, or drop it"
        )
    reuse = options.memory_reuse or NONE
    if reuse == NONE:
        return
    flag = f"{PREFIX}memory-reuse {reuse}"
    if config.fp8 or config.fp4:
        raise ConfigurationError(
            f"{flag} does not know what experts in {'--fp8-format' if config.fp8 else '--fp4-format'} save: use "
            f"{PREFIX}memory-reuse {NONE}"
        )
    if "moe_act" in recomputed_modules(config):
        raise ConfigurationError(
            f"{flag} restores all that experts save, and --recompute-modules moe_act a part of it: drop one of the two"
        )
    if getattr(config, "fine_grained_activation_offloading", False):
        raise ConfigurationError(
            f"--fine-grained-activation-offloading offloads what {flag} restores in another way: drop one of the two"
        )


def _unread_profile(options: MpmoeOptions) -> str | None:
    return None if options.tunes_partitions else f"give {PREFIX}partitions {AUTO}"


def _parse(variant: str, setting: str, profile: Path | None) -> Mapping[str, Any]:
    if setting == AUTO:
        return {"partitions": AUTO, **chosen_by_profile(variant, profile)}
    parts = re.fullmatch(rf"([1-9][0-9]*)(?::({'|'.join(STRATEGIES)}))?", setting)
    if parts is None:
        raise ConfigurationError(
            f"--dispatchers {variant}: write a number of partitions and, where they share memory, how ("
            f"{', '.join(STRATEGIES)}), such as mpmoe:4 or mpmoe:4:S3, or mpmoe:auto"
        )
    return {"partitions": int(parts[1]), "memory_reuse": parts[2]}


def _write(options: MpmoeOptions, levels: int) -> str:
    return _setting(options.partitions or DEFAULT_PARTITIONS, options.memory_reuse or NONE)


def _setting(count: int, strategy: str) -> str:
    return str(count) if strategy == NONE else f"{count}:{strategy}"


def candidate(layer: LayerOnCluster, count: int, strategy: str) -> Prediction:
    """Returns what the layer takes in so many partitions.

    Expert-TP's collectives of each run in a lane of their own beside the all-to-alls, as MoNTA's do.

    Raises:
        ConfigurationError: a curve is missing.
    """
    one, row = layer.workload, row_bytes(layer.workload)
    computed, exchanged = (partitions(one, rows, count) for rows in (layer.computed, layer.exchanged))
    parts = [replace(part, own=other.own) for part, other in zip(computed, exchanged, strict=True)]
    schedules = [build(strategy, parts, row, one.ep, one.etp) for build in (forward, backward)]
    held = activation_bytes(one, one.rows, count, strategy)
    variant = f"{NAME}:{_setting(count, strategy)}"
    predicted = layer.prediction(variant, schedules, layer.edge, costs=layer.expert_costs, parts=count)
    return replace(predicted, activation_bytes=held)


def _candidates(layer: LayerOnCluster, options: MpmoeOptions) -> Iterator[Prediction]:
    """A single partition has nothing to share: all strategies are the same."""
    strategies = options.memory_strategies
    for strategy in strategies:
        for count in options.partition_counts:
            if count > 1 or strategy == strategies[0]:
                yield candidate(layer, count, strategy)


MPMOE = System(
    name=NAME,
    options=MpmoeOptions,
    reads=("profile",),
    unread_profile=_unread_profile,
    build=_build,
    attach=_attach,
    check=_check,
    grammar=Grammar(_parse, _write),
    candidates=_candidates,
    calls_experts=True,
    is_pipeline_of_experts=True,
)
