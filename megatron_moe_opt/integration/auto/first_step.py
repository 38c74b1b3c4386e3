"""What `auto` tries in the layers of each shape, from what all ranks saw them do in the first step, or in a later one
that ran like it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto.memory_room import Above, Room
from megatron_moe_opt.integration.auto.sample_saving import worth_moving
from megatron_moe_opt.integration.auto.stock_variants import stock_variants
from megatron_moe_opt.integration.checks import check_config
from megatron_moe_opt.integration.layer.replicated_tokens import (
    NOT_UNDER_STOCK,
    holds_replicated_tokens,
    routes_together,
)
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.planner import best, candidates, in_fewest_parts
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, Prediction, Refusal
from megatron_moe_opt.planning.predicting.skew import most_uneven_layer
from megatron_moe_opt.row_format import narrower
from megatron_moe_opt.systems import system_of
from megatron_moe_opt.systems.system import RunTraits
from megatron_moe_opt.variants import split_variant

_Found = TypeVar("_Found")

REPLICATED_START = "monta:O1"  # what runs first where stock refuses to train


@dataclass(frozen=True)
class SeenExperts:
    """What the experts of one layer of one rank were seen to do in a step, and what their parameters are."""

    outside: tuple[int, ...] | None = None
    """The shape of something trained that takes part in them and is none of their parameters; None: nothing does."""
    draw: bool = False
    """Whether they draw random numbers."""
    trained: bool = True
    """Whether any of their parameters is trained."""
    dtypes: tuple[str, ...] = ()
    """The dtypes of their parameters."""
    group: int = 0
    """The first of the ranks that share the layer's experts."""
    called_by: str | None = None
    """The method of the layer's own class that calls them; None: Megatron's."""
    stays_behind: str | None = None
    """What they have that does not travel with their parameters; None: nothing."""


@dataclass(frozen=True)
class Seen:
    """What one layer of one rank was seen to do in a step."""

    workload: LayerWorkload
    rows: float
    """The mean number of rows that this rank's experts computed in a pass."""
    passes: int = 1
    """Number of forward passes."""
    tokens: tuple[int, int] = (0, 0)
    """The fewest and the most tokens of a pass."""
    experts: SeenExperts = SeenExperts()
    """What its experts showed."""
    routed_by: str | None = None
    """What others have put in the place of its router, or of a part of it; None: all is Megatron's."""


@dataclass(frozen=True)
class FirstStep:
    """What was found in the first step, or in a later one that ran like it, on one rank or on all."""

    seen: tuple[tuple[Seen, ...], ...]
    """Each rank's layers, in their order."""
    rooms: tuple[Room, ...] = ()
    """The memory that the GPU of each rank had; empty where there are no GPUs."""
    placement_saving: float | None = None
    """The part of the bytes between nodes that `netmoe` would have saved; None: not known."""
    at_home: str | None = None
    """Why samples do not move, though `netmoe` could run; None: they may."""

    @property
    def workloads(self) -> list[LayerWorkload]:
        """Returns the workloads of all layers of all ranks."""
        return [one.workload for of_rank in self.seen for one in of_rank]

    @property
    def spare(self) -> int | None:
        """Returns the bytes that the fullest GPU with MoE layers may be planned with; None: they are not counted."""
        return min((one.spare for one in self.rooms if one.passes), default=None)

    @property
    def tokens(self) -> tuple[int, int]:
        """Returns the fewest and the most tokens of a pass on any rank."""
        found = [one.tokens for of_rank in self.seen for one in of_rank]
        return min(fewest for fewest, _ in found), max(most for _, most in found)

    @property
    def by_shape(self) -> dict[LayerWorkload, list[list[Seen]]]:
        """Returns each rank's layers by their shape: the workload that they share, but for its tokens."""
        found: dict[LayerWorkload, list[list[Seen]]] = {}
        shapes: dict[LayerWorkload, LayerWorkload] = {}  # by workloads: layers of thousands of ranks have few
        for rank, of_rank in enumerate(self.seen):
            for one in of_rank:
                if one.workload not in shapes:
                    shape = shapes[one.workload] = dataclasses.replace(one.workload, tokens=0)
                    found.setdefault(shape, [[] for _ in self.seen])
                found[shapes[one.workload]][rank].append(one)
        return found


def of_all(ranks: Sequence[FirstStep]) -> FirstStep:
    """Returns what holds for all ranks together: the mean saving of those that know one."""
    savings = [one.placement_saving for one in ranks if one.placement_saving is not None]
    return FirstStep(
        tuple(of_rank for one in ranks for of_rank in one.seen),
        tuple(room for one in ranks for room in one.rooms),
        statistics.mean(savings) if savings else None,
        _first(one.at_home for one in ranks),
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
    """The planned variant; None: it is not the same for all of the layers, or they run what cannot be left."""
    passes: int
    """The forward passes of all of the layers on a rank in the step, on the rank that had most."""
    workload: LayerWorkload
    """The workload planned for: that of the layer with most tokens, its rows as uneven as in the most uneven layer."""
    beside: tuple[str, ...] = ()
    """The variants of Megatron's own that are tried without a prediction."""
    ran: str = ALLTOALL
    """The variant of the step that this was planned by."""
    kept: str | None = None
    """The variant that earlier trials have kept in the layers; None: it is not predicted, or there were no trials."""

    def keeping(self, variant: str | None) -> Alike:
        """Returns a copy that notes which variant earlier trials chose, if it is still among the predicted."""
        return dataclasses.replace(self, kept=variant if variant in [one.variant for one in self.predicted] else None)

    def above(self, variant: str, than: str | None = None) -> Above:
        """Returns what a layer is predicted to hold under a variant beyond what it held, or holds under another;
        nothing: not predicted.
        """
        return _above(self.predicted, than or self.ran).get(variant, Above(0, 0))

    def communicators(self, variant: str) -> int:
        """Returns the most communicators that get buffers for a variant on a rank, besides those of the step."""
        return 0 if variant == self.ran else _communicators(variant, {self.workload.workers}, self.workload.etp)


def tried_by_plan(plan: Plan, config: Any, first: FirstStep, left_out: Mapping[str, str]) -> Alike:
    """Returns what a plan.json has all layers try, whatever their shape.

    Args:
        left_out: variants that are not tried, and why.
    """
    beside, not_beside = _beside(config, first, left_out)
    run = _run(config, first.seen, samples_may_move=False)
    ran = runs_first(config, plan)
    allowed, refused = _allowed(config, plan.candidates, run, first.rooms, ran, left_out)
    variants = set(plan.layers.values())
    planned = ran if len(variants) == 1 and variants <= {one.variant for one in allowed} else None
    refused, passes = (*refused, *not_beside), _most_passes(first.seen)
    return Alike(None, allowed, refused, planned, passes, _workload(first.seen), beside, ran)


def tried_by_profile(
    cluster: Cluster, config: Any, options: Options, first: FirstStep, left_out: Mapping[str, str]
) -> tuple[Alike, ...]:
    """Returns what a profile has the layers of each shape try, those first that take most time.

    Args:
        left_out: variants that are not tried, and why.
    """
    beside, not_beside = _beside(config, first, left_out)
    by_shape, ran = first.by_shape, runs_first(config)
    by_time: list[tuple[float, Alike]] = []
    for shape, of_ranks in by_shape.items():
        workload = dataclasses.replace(_workload(of_ranks), placement_saving=first.placement_saving)
        wires = narrower(workload.element_bytes) if options.allow_lossy else ()
        found, not_here = candidates(workload, cluster, options.activation_budget, wires)
        refused = {one.variant: one for one in not_here}
        found, at_home = worth_moving(found, first.placement_saving, first.at_home, unlike=len(by_shape) > 1)
        refused |= {one.variant: one for one in at_home}
        run = _run(config, of_ranks, samples_may_move=True)
        allowed, not_allowed = _allowed(config, found, run, first.rooms, ran, left_out)
        choice, passes = in_fewest_parts(best(allowed), allowed), _most_passes(of_ranks)
        without_timelines = tuple(dataclasses.replace(one, timelines=()) for one in allowed)
        all_refused = (*refused.values(), *not_allowed, *not_beside)
        of_shape = Alike(shape, without_timelines, all_refused, choice.variant, passes, workload, beside, ran)
        by_time.append((passes * choice.seconds, of_shape))
    return tuple(one for _, one in sorted(by_time, key=lambda one: -one[0]))


def runs_first(config: Any, plan: Plan | None = None) -> str:
    """Returns what runs in the step by which is planned: what a plan has all layers run, else stock where it trains."""
    if plan is not None:
        return next(iter(plan.layers.values()))
    return REPLICATED_START if holds_replicated_tokens(config) else ALLTOALL


def refusal(config: Any, variant: str) -> str | None:
    """Returns why a configuration cannot run a variant; None: it can."""
    if variant == ALLTOALL:
        if holds_replicated_tokens(config):
            return NOT_UNDER_STOCK
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


def _run(config: Any, of_ranks: Sequence[Sequence[Seen]], samples_may_move: bool) -> RunTraits:
    """Returns what decides whether layers can change to a system and from it.

    Args:
        of_ranks: what each rank saw of these layers, in their order.
    """
    seen = [one for of_rank in of_ranks for one in of_rank]
    return RunTraits(
        workers=frozenset(one.workload.workers for one in seen),
        routes_together=routes_together(config),
        samples_may_move=samples_may_move,
        outside=_first(one.experts.outside for one in seen),
        experts_draw=any(one.experts.draw for one in seen),
        some_frozen=_some_frozen(of_ranks),
        dtypes=_several_dtypes(of_ranks),
        called_by=_first(one.experts.called_by for one in seen),
        stays_behind=_first(one.experts.stays_behind for one in seen),
        routed_by=_first(one.routed_by for one in seen),
    )


def _first(found: Iterable[_Found | None]) -> _Found | None:
    return next((one for one in found if one is not None), None)


def _some_frozen(of_ranks: Sequence[Sequence[Seen]]) -> bool:
    """Whether the experts of some layer are frozen on some ranks that share them, and not on others. Those of whole
    layers, and of stages, may be.
    """
    return any(len({one.trained for one in of_layer}) > 1 for of_layer in _by_layer(of_ranks))


def _several_dtypes(of_ranks: Sequence[Sequence[Seen]]) -> tuple[str, ...]:
    """Returns the dtypes of a layer's experts on all ranks that share them, where these are several; else none."""
    found = ({dtype for one in of_layer for dtype in one.dtypes} for of_layer in _by_layer(of_ranks))
    return next((tuple(sorted(dtypes)) for dtypes in found if len(dtypes) > 1), ())


def _by_layer(of_ranks: Sequence[Sequence[Seen]]) -> Iterable[list[SeenExperts]]:
    """Returns, for each layer, what the ranks that share its experts saw of them: such ranks have the same layers."""
    found: dict[tuple[int, int], list[SeenExperts]] = {}
    for of_rank in of_ranks:
        for number, one in enumerate(of_rank):
            found.setdefault((one.experts.group, number), []).append(one.experts)
    return found.values()


def _beside(config: Any, first: FirstStep, left_out: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[Refusal, ...]]:
    """Returns Megatron's other dispatchers that are tried, and those that are not."""
    found, refused = stock_variants(config, first.workloads, first.tokens, first.spare)
    tried = tuple(one for one in found if one not in left_out)
    return tried, (*refused, *(Refusal(one, left_out[one]) for one in found if one in left_out))


def _allowed(
    config: Any,
    predictions: Sequence[Prediction],
    run: RunTraits,
    rooms: Sequence[Room],
    ran: str,
    left_out: Mapping[str, str],
) -> tuple[tuple[Prediction, ...], tuple[Refusal, ...]]:
    """Returns what layers can change to and from in this configuration, and what they cannot."""
    above = _above(predictions, ran)
    reasons: dict[str, str | None] = {}
    for variant in above:
        reason = refusal(config, variant) or _why_fixed(variant, run)
        if reason is None and variant != ran:
            reason = left_out.get(variant)
        if reason is None and variant != ran:
            communicators = _communicators(variant, run.workers, config.expert_tensor_parallel_size or 1)
            reason = _too_large(above[variant], communicators, rooms)
        reasons[variant] = reason
    allowed = tuple(one for one in predictions if reasons[one.variant] is None)
    return allowed, tuple(Refusal(variant, reason) for variant, reason in reasons.items() if reason is not None)


def _above(predictions: Sequence[Prediction], ran: str) -> dict[str, Above]:
    """Returns what each holds besides what a step under `ran` did, or the least of them where nobody predicts that."""
    others = {one.variant: one.held_more.of_others for one in predictions}
    held = {one.variant: one.activation_bytes - others[one.variant] for one in predictions}
    of_ran, others_of_ran = held.get(ran, min(held.values(), default=0)), others.get(ran, 0)
    return {name: Above(max(0, held[name] - of_ran), max(0, others[name] - others_of_ran)) for name in held}


def _communicators(variant: str, workers: Collection[tuple[int, ...]], etp: int) -> int:
    """Returns how many communicators get buffers for a variant at most: those that it makes, and those over which stock
    gathers and sums only, and a rank now sends to each other one.

    Args:
        workers: of each network level, of each kind of expert-parallel group.
    """
    system, (_, options) = system_of(variant), split_variant(variant, None)
    if system is None:
        return 0
    of_domains = [system.domains(options, one) for one in workers if one]
    own = max((domains.groups for domains in of_domains if domains is not None), default=0)
    return own + (etp > 1) + system.moves_samples  # rows over expert-TP, or both at once; samples over both


def _too_large(above: Above, communicators: int, rooms: Sequence[Room]) -> str | None:
    """Returns why a variant under which a layer holds so much more does not fit."""
    spare = min((one.spare for one in rooms if not one.has(above, communicators)), default=None)
    if spare is None:
        return None
    return (
        f"holds {above.of_pass} bytes more than what ran for each pass of a layer, and {above.of_others} of experts of "
        f"other ranks, and takes {communicators} communicators, where {spare} bytes are free: a trial could "
        "run out of memory"
    )


def _why_fixed(variant: str, run: RunTraits) -> str | None:
    """Returns why layers cannot change to a variant, or from it."""
    system, (_, options) = system_of(variant), split_variant(variant, None)
    return None if system is None else system.why_fixed(options, run)
