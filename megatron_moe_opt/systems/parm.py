"""Parm: one all-to-all over expert and expert-tensor parallelism, and tokens of a TP group that are moved once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO, one_of
from megatron_moe_opt.planning.predicting import parm
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_passes import Pass
from megatron_moe_opt.planning.predicting.prediction import Prediction, Refusal
from megatron_moe_opt.schedules.monta import even_chunks
from megatron_moe_opt.schedules.parm import AAS, SCHEDULES, outline
from megatron_moe_opt.schedules.schedule import Schedule
from megatron_moe_opt.systems.system import (
    CHOOSES,
    FLAG,
    PREFIX,
    Grammar,
    RunTraits,
    SharedOptions,
    System,
    check_first_pass,
    chosen_by_profile,
    option,
)

NAME = "parm"
_ANOTHER = (
    "drops or balances all tokens of a TP group together, the others those of each rank, which is another function"
)


@dataclass(frozen=True)
class ParmOptions(SharedOptions):
    """Where the tokens that all ranks of a TP group hold are split."""

    parm_schedule: str | None = option(
        "parm-schedule",
        one_of(*SCHEDULES, AAS, AUTO),
        "where the parm dispatcher splits tokens that all TP ranks hold: before the gate (S1) or after it (S2; or AAS, "
        "for comparison: S2 with its AllGather behind the whole all-to-all) (default: auto with a profile, else S1)",
        auto=CHOOSES,
    )

    @property
    def schedule_profile(self) -> Path | None:
        """Returns the profile by which `parm` chooses its schedule; None where the user chose."""
        return self.profile if self.parm_schedule in (None, AUTO) else None

    def check(self) -> None:
        """Refuses, with ConfigurationError, auto without a profile."""
        self.auto_needs_profile("parm_schedule")


def _build(groups: Any, options: ParmOptions, config: Any) -> Any:
    from megatron_moe_opt.dispatchers.parm import ParmDispatcher
    from megatron_moe_opt.dispatchers.parm_schedule import schedule_of
    from megatron_moe_opt.integration.layer.configured_workload import layer_workload
    from megatron_moe_opt.integration.layer.replicated_tokens import keeps_from_splitting_rows, routes_together

    workload = layer_workload(config, groups, wire=options.wire)
    without_s2 = keeps_from_splitting_rows(config) or (f"it {_ANOTHER}" if routes_together(config) else None)
    return ParmDispatcher(groups, schedule_of(options, groups, workload, without_s2), options.wire)


def _check(config: Any, options: ParmOptions, arguments: Any) -> None:
    check_first_pass(arguments, options.schedule_profile, f"{PREFIX}parm-schedule")
    if (flag := _copies_flag(options)) is not None and config.sequence_parallel:
        raise ConfigurationError(
            f"{flag} splits what all TP ranks hold, but with --sequence-parallel they hold parts of it: drop one of "
            "the two"
        )


def _copies_flag(options: ParmOptions) -> str | None:
    return f"{PREFIX}parm-schedule {options.parm_schedule}" if options.parm_schedule in ("S2", AAS) else None


def _unread_profile(options: ParmOptions) -> str | None:
    return None if options.schedule_profile is not None else f"leave {PREFIX}parm-schedule at {AUTO}"


def _parse(variant: str, setting: str, profile: Path | None) -> Mapping[str, Any]:
    if setting == AUTO:
        return chosen_by_profile(variant, profile)
    if setting not in (*SCHEDULES, AAS):
        raise ConfigurationError(
            f"--dispatchers {variant}: write a schedule ({', '.join(SCHEDULES)}, or {AAS}: S2 without overlap), or "
            "parm:auto"
        )
    return {"parm_schedule": setting}


def _candidates(layer: LayerOnCluster, options: ParmOptions) -> Iterator[Prediction | Refusal]:
    """Predicts the fused all-to-all; and SAA, where all TP ranks hold the same tokens."""
    one = layer.workload
    asked = SCHEDULES if options.parm_schedule in (None, AUTO) else (options.parm_schedule,)
    if one.ep * one.etp == 1 or max(one.etp, one.tp) == 1:
        yield Refusal(NAME, "experts are whole and tokens split: its all-to-all is monta:O1's")
        return

    def fused(exchanged: Pass) -> Schedule:
        return outline(exchanged.direction, 1, one.etp).sized(even_chunks(exchanged.exchanged, one.etp, 1))

    if "S1" in asked:
        yield layer.prediction("parm:S1", [fused(exchanged) for exchanged in layer.passes], layer.edge)
    if "S2" in asked and one.tp > 1:
        yield layer.played("parm:S2", parm.s2_timelines(one, one.tokens, layer.cluster, layer.skew.exchanged))


def _why_fixed(options: ParmOptions, run: RunTraits) -> str | None:
    if _copies_flag(options) is None or not run.routes_together:
        return None
    return f"{_ANOTHER}: choose {FLAG} {NAME}"


PARM = System(
    name=NAME,
    options=ParmOptions,
    reads=("profile", "expert_order", "wire"),
    unread_profile=_unread_profile,
    build=_build,
    check=_check,
    copies_flag=_copies_flag,
    grammar=Grammar(_parse, lambda options, levels: options.parm_schedule or "S1"),
    candidates=_candidates,
    why_fixed=_why_fixed,
)
