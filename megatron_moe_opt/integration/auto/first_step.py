"""What `auto` tries in the layers of each shape, from what all ranks saw them do in the first step."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto.sample_saving import worth_moving
from megatron_moe_opt.integration.auto.stock_variants import stock_variants
from megatron_moe_opt.integration.checks import check_config
from megatron_moe_opt.integration.layer.replicated_tokens import holds_replicated_tokens
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.planner import best, candidates
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, Prediction, Refusal
from megatron_moe_opt.planning.predicting.skew import most_uneven_layer
from megatron_moe_opt.row_format import narrower
from megatron_moe_opt.systems import system_of
from megatron_moe_opt.systems.system import Run
from megatron_moe_opt.variants import split_variant


@dataclass(frozen=True)
class Seen:
    """What one layer of one rank was seen to do in a step."""

    workload: LayerWorkload
    rows: float
    """Rows of this rank in a pass."""
    passes: int = 1
    """Number of forward passes."""


@dataclass(frozen=True)
class FirstStep:
    """What was found in the first step, on one rank or on all."""

    seen: tuple[tuple[Seen, ...], ...]
    """Each rank's layers, in their order."""
    room: int | None = None
    """The bytes that each pass of a layer may hold besides what stock's held. A trial that runs out of memory on one
    rank would end the job. None: they are not counted."""
    spare: int | None = None
    """The bytes that nothing held when most was in use; None: they are not counted."""
    placement_saving: float | None = None
    """The part of the bytes between nodes that `netmoe` would have saved; None: not known."""
    at_home: str | None = None
    """Why samples do not move, though `netmoe` could run; None: they may."""


def of_all(ranks: Sequence[FirstStep]) -> FirstStep:
    """Returns what holds for all ranks together: the least room, and the mean saving of those that know one."""
    savings = [one.placement_saving for one in ranks if one.placement_saving is not None]
    return FirstStep(
        tuple(of_rank for one in ranks for of_rank in one.seen),
        min((one.room for one in ranks if one.room is not None), default=None),
        min((one.spare for one in ranks if one.spare is not None), default=None),
        statistics.mean(savings) if savings else None,
        next((one.at_home for one in ranks if one.at_home is not None), None),
    )


@dataclass(frozen=True)
class Alike:
    """What is tried in the layers of one shape."""

    shape: LayerWorkload | None
    """The workload that these layers share, of no tokens; None: all layers, whatever their shape."""
    predicted: tuple[Prediction, ...]
    """Predictions for a pass of one of them, the fastest first."""
    refused: tuple[Refusal, ...]
    planned: str | None
    """None: not the same for all of them, or what cannot be left."""
    passes: int
    """Forward passes of all of them on a rank in the first step, on the rank that had most."""
    beside: tuple[str, ...] = ()
    """What of Megatron's own is tried without a prediction."""


def tried_by_plan(plan: Plan, config: Any, first: FirstStep) -> Alike:
    """Returns what a plan.json has all layers try, whatever their shape."""
    layers = [one for of_rank in first.seen for one in of_rank]
    beside, not_beside = stock_variants(config, [one.workload for one in layers], first.spare)
    workers = {one.workload.workers for one in layers}
    run = _run(config, workers, samples_may_move=False)
    allowed, refused = _allowed(config, plan.candidates, run, first.room)
    variants = set(plan.layers.values())
    switchable = len(variants) == 1 and variants <= {one.variant for one in allowed}
    planned = variants.pop() if switchable else None
    return Alike(None, allowed, (*refused, *not_beside), planned, _most_passes(first.seen), beside)


def tried_by_profile(cluster: Cluster, config: Any, options: Options, first: FirstStep) -> tuple[Alike, ...]:
    """Returns what a profile has the layers of each shape try, those first that take most time.

    Raises:
        ConfigurationError: no layer has run on any rank.
    """
    if not any(first.seen):
        raise ConfigurationError("--moe-token-dispatcher-type auto: no MoE layer has run in the first step")
    workloads = [one.workload for of_rank in first.seen for one in of_rank]
    beside, not_beside = stock_variants(config, workloads, first.spare)
    by_shape: dict[LayerWorkload, list[list[Seen]]] = {}
    for rank, of_rank in enumerate(first.seen):
        for one in of_rank:
            shape = dataclasses.replace(one.workload, tokens=0)
            by_shape.setdefault(shape, [[] for _ in first.seen])[rank].append(one)
    by_time: list[tuple[float, Alike]] = []
    for shape, of_ranks in by_shape.items():
        workload = dataclasses.replace(_workload(of_ranks), placement_saving=first.placement_saving)
        wires = narrower(workload.element_bytes) if options.allow_lossy else ()
        found, not_here = candidates(workload, cluster, options.activation_budget, wires)
        refused = {one.variant: one for one in not_here}
        found, at_home = worth_moving(found, first.placement_saving, first.at_home, unlike=len(by_shape) > 1)
        refused |= {one.variant: one for one in at_home}
        run = _run(config, {shape.workers}, samples_may_move=True)
        allowed, not_allowed = _allowed(config, found, run, first.room)
        choice, passes = best(allowed), _most_passes(of_ranks)
        without_timelines = tuple(dataclasses.replace(one, timelines=()) for one in allowed)
        all_refused = (*refused.values(), *not_allowed, *not_beside)
        of_shape = Alike(shape, without_timelines, all_refused, choice.variant, passes, beside)
        by_time.append((passes * choice.seconds, of_shape))
    return tuple(one for _, one in sorted(by_time, key=lambda one: -one[0]))


def refusal(config: Any, variant: str) -> str | None:
    """Returns why a configuration cannot run a variant; None: it can."""
    if variant == ALLTOALL:
        if holds_replicated_tokens(config):
            return "stock Megatron does not train MoE layers under TP without --sequence-parallel: add it"
        return None
    name, options = split_variant(variant, None)
    try:
        check_config(config, name, options)
    except ConfigurationError as error:
        return str(error)
    return None


def _workload(of_ranks: Sequence[Sequence[Seen]]) -> LayerWorkload:
    """Returns that of layers of one shape: the most tokens of any, and rows as uneven as theirs were."""
    alike = [one for of_rank in of_ranks for one in of_rank]
    rows = [one.rows for one in alike]
    return dataclasses.replace(
        alike[0].workload,
        tokens=max(one.workload.tokens for one in alike),
        imbalance=max(1.0, max(rows) * len(rows) / sum(rows)) if sum(rows) else 1.0,
        rank_rows=most_uneven_layer([[one.rows for one in of_rank] for of_rank in of_ranks]),
    )


def _most_passes(of_ranks: Sequence[Sequence[Seen]]) -> int:
    return max(sum(one.passes for one in of_rank) for of_rank in of_ranks)


def _run(config: Any, workers: set[tuple[int, ...]], samples_may_move: bool) -> Run:
    """Returns what decides whether layers can change to a system and from it.

    Args:
        workers: of each network level of the expert-parallel groups, as this run finds them.
    """
    drops = config.moe_expert_capacity_factor is not None
    balances = config.moe_router_load_balancing_type == "sinkhorn"
    return Run(frozenset(workers), drops or balances, samples_may_move=samples_may_move)


def _allowed(
    config: Any, predictions: Sequence[Prediction], run: Run, room: int | None
) -> tuple[tuple[Prediction, ...], tuple[Refusal, ...]]:
    """Returns what layers can change to and from in this configuration, and what they cannot."""
    of_stock = next((one.activation_bytes for one in predictions if one.variant == ALLTOALL), 0)
    reasons = [
        refusal(config, one.variant) or _stays(one.variant, run) or _needs(one.activation_bytes - of_stock, room)
        for one in predictions
    ]
    found = list(zip(predictions, reasons, strict=True))
    allowed = tuple(one for one, reason in found if reason is None)
    return allowed, tuple(Refusal(one.variant, reason) for one, reason in found if reason is not None)


def _needs(above: int, room: int | None) -> str | None:
    """Returns why a variant that holds so many bytes more than stock for each pass of a layer does not fit."""
    if room is None or above <= room:
        return None
    return f"holds {above} bytes more than stock for each layer, and {room} are free: a trial could run out of memory"


def _stays(variant: str, run: Run) -> str | None:
    """Returns why layers cannot change to a variant, or from it."""
    system, (_, options) = system_of(variant), split_variant(variant, None)
    return None if system is None else system.stays(options, run)
