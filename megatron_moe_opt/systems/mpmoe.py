"""MPMoE: rows go through their experts in partitions, as one pipeline, whose partitions may share memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO, BYTES, one_of
from megatron_moe_opt.option_values import PARTITIONS as SEVERAL_PARTITIONS
from megatron_moe_opt.planning.choosing.partition_search import PARTITIONS
from megatron_moe_opt.planning.costs.curves import Costs
from megatron_moe_opt.planning.predicting.expert_migration import curve_of, measured_curves
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.partitioned_rows import (
    activation_bytes,
    hop_partitions,
    hop_row_bytes,
    partitions,
    row_bytes,
)
from megatron_moe_opt.planning.predicting.prediction import Prediction, Refusal
from megatron_moe_opt.schedules.hops import HopStages, level_of
from megatron_moe_opt.schedules.mpmoe import NONE, STRATEGIES, Partition, backward, by_rows, forward
from megatron_moe_opt.schedules.schedule import Kind, Op
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
    shown,
)
from megatron_moe_opt.topology.domains import stationary

NAME = "mpmoe"
DEFAULT_PARTITIONS = 4
ROWS, HOPS = "rows", "hops"


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
    way: str | None = option(
        "way",
        one_of(ROWS, HOPS, AUTO),
        "how mpmoe's partitions, or netmoe's samples, go to their experts: rows, one for each expert of a token; or "
        f"hops, a token once over every link, over the network levels of {PREFIX}levels (default: {ROWS})",
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
        """Whether `mpmoe` chooses any of its partitions, its memory reuse and its way."""
        return len(self.partition_counts) > 1 or AUTO in (self.memory_reuse, self.way)

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

    @property
    def ways(self) -> tuple[str, ...]:
        """Of `mpmoe`'s partitions, to choose from; one where the user chose."""
        return (ROWS, HOPS) if self.way == AUTO else (self.way or ROWS,)

    def check(self) -> None:
        """Refuses, with ConfigurationError, several numbers of partitions, or auto, without a profile."""
        if isinstance(self.partitions, tuple) and len(self.partitions) > 1:
            self.needs_profile("partitions")
        self.auto_needs_profile("partitions", "memory_reuse", "way")


def _build(groups: Any, options: MpmoeOptions, config: Any) -> Any:
    from megatron_moe_opt.dispatchers.mpmoe import MpmoeDispatcher
    from megatron_moe_opt.dispatchers.partitioning import partitioning_of
    from megatron_moe_opt.integration.layer.configured_workload import layer_workload
    from megatron_moe_opt.runtime.rows.token_hops import TokenHops
    from megatron_moe_opt.topology.domain_groups import domain_groups, levels_of
    from megatron_moe_opt.topology.domains import stationary

    if HOPS not in options.ways:
        workload = layer_workload(config, groups, wire=options.wire)
        return MpmoeDispatcher(groups, partitioning_of(options, groups, workload), wire=options.wire)
    workers = levels_of(groups.ep, options.network_levels)
    workload = layer_workload(config, groups, workers, wire=options.wire)
    dispatcher = MpmoeDispatcher(groups, partitioning_of(options, groups, workload), wire=options.wire)
    hops_in = domain_groups(groups.ep, stationary(workers), dispatcher)
    dispatcher.hops = TokenHops(hops_in, groups, config.num_moe_experts, config.moe_router_topk, options.wire)
    return dispatcher


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
    if options.network_levels is not None and HOPS not in options.ways:
        raise ConfigurationError(
            f"{PREFIX}levels {shown(options.network_levels)} says over which links tokens hop, and rows do not: give "
            f"{PREFIX}way {HOPS}, or drop it"
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
    parts = re.fullmatch(rf"([1-9][0-9]*)(?::({'|'.join(STRATEGIES)}))?(?::({HOPS}))?", setting)
    if parts is None:
        raise ConfigurationError(
            f"--dispatchers {variant}: write a number of partitions, where they share memory how ("
            f"{', '.join(STRATEGIES)}), and {HOPS} where a token crosses links once, such as mpmoe:4, mpmoe:4:S3, "
            f"mpmoe:4:{HOPS} or mpmoe:4:S3:{HOPS}; or mpmoe:auto"
        )
    return {"partitions": int(parts[1]), "memory_reuse": parts[2], "way": parts[3]}


def _write(options: MpmoeOptions, levels: int) -> str:
    return _setting(options.partitions or DEFAULT_PARTITIONS, options.memory_reuse or NONE, options.way or ROWS)


def _setting(count: int, strategy: str, way: str) -> str:
    return ":".join([str(count), *([strategy] if strategy != NONE else []), *([way] if way != ROWS else [])])


def _kind(setting: str) -> str:
    """A token once over a link, or a row for each of its experts."""
    return HOPS if setting.endswith(HOPS) else ""


def candidate(layer: LayerOnCluster, count: int, strategy: str, way: str = ROWS) -> Prediction:
    """Returns what the layer takes in so many partitions.

    What goes on inside nodes runs in a lane of its own beside the all-to-alls between them, as MoNTA's does.

    Raises:
        ConfigurationError: a curve is missing.
    """
    one, variant = layer.workload, f"{NAME}:{_setting(count, strategy, way)}"
    if way == HOPS:
        parts: Sequence[Partition] = hop_partitions(one, layer.skew, layer.computed, count)
        row, stages, own = hop_row_bytes(one), HopStages(len(one.workers), True, one.etp), parts[0].own * count
    else:
        computed, exchanged = (partitions(one, rows, count) for rows in (layer.computed, layer.exchanged))
        parts = [replace(part, own=other.own) for part, other in zip(computed, exchanged, strict=True)]
        row, stages, own = row_bytes(one), by_rows(one.ep, one.etp), None
    schedules = [build(strategy, parts, row, stages) for build in (forward, backward)]
    held = activation_bytes(one, one.rows, count, strategy, own)
    predicted = layer.prediction(
        variant, schedules, layer.edge, costs=costs_of(layer, way), parts=count, local_rows=own
    )
    return replace(predicted, activation_bytes=held)


def costs_of(layer: LayerOnCluster, way: str) -> Callable[[Op], float]:
    """Returns what the ops of the pipeline take on a way. Raises ConfigurationError where no expert was measured."""
    return HopSeconds(layer, layer.expert_costs) if way == HOPS else layer.expert_costs


class HopSeconds:
    """What ops cost where tokens hop: all-to-alls by their level, copies and sums of rows as copies."""

    def __init__(self, layer: LayerOnCluster, costs: Costs) -> None:
        self._costs, self._domains = costs, stationary(layer.workload.workers)
        self._curves = measured_curves(layer.costs, layer.workload.workers)

    def __call__(self, op: Op) -> float:
        if op.kind is not Kind.ALL_TO_ALL:
            return self._costs(replace(op, kind=Kind.COPY) if op.kind is Kind.PERMUTE else op)
        level = level_of(op.group)
        curve = curve_of(self._curves, op.kind, level, self._domains.domains(level))
        return self._costs.overhead + curve.seconds(op.size)


def _candidates(layer: LayerOnCluster, options: MpmoeOptions) -> Iterator[Prediction | Refusal]:
    """A single partition has nothing to share: all strategies are the same."""
    strategies = options.memory_strategies
    for way in options.ways:
        refusal = no_hops(layer) if way == HOPS else None
        if refusal is not None:
            yield Refusal(f"{NAME}:{HOPS}", refusal)
            continue
        for strategy in strategies:
            for count in options.partition_counts:
                if count > 1 or strategy == strategies[0]:
                    yield candidate(layer, count, strategy, way)


def no_hops(layer: LayerOnCluster) -> str | None:
    """Why tokens of a layer cannot hop, or nobody knows what that takes."""
    one = layer.workload
    if not one.workers:
        return "the network levels of the expert-parallel group are not known"
    domains, curves = stationary(one.workers), measured_curves(layer.costs, one.workers)
    for level in range(domains.levels):
        ranks = domains.domains(level)
        if ranks > 1 and (Kind.ALL_TO_ALL, level, ranks) not in curves:
            return f"no all-to-all of {ranks} ranks at network level {level} was measured: moe-opt profile --domains"
    return None


MPMOE = System(
    name=NAME,
    options=MpmoeOptions,
    reads=("profile", "network_levels", "wire"),
    unread_profile=_unread_profile,
    build=_build,
    attach=_attach,
    check=_check,
    grammar=Grammar(_parse, _write, _kind),
    candidates=_candidates,
    calls_experts=True,
    is_pipeline_of_experts=True,
)
