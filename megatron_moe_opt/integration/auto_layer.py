"""`auto`: MoE layers whose dispatcher is planned, tried and then kept.

    step 1           stock runs, and the layers see how many rows they have and how unevenly (with a plan.json the plan)
    after step 1     rank 0 ranks all candidates by the profile (planning/planner.py) and tells the others
    steps 2 to n     the plan, stock and the runners-up take turns, ever fewer of them (planning/trials.py)
    from then on     the fastest runs, by the slowest rank's times, on all ranks

All candidates compute the same function, so that training does not notice. Dispatchers are exchanged between optimizer
steps only: no pass of theirs is under way then, and recomputed passes find what their first run used. None that loses
information is a candidate.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe_opt.dispatchers.pipelining import agreed_cluster
from megatron_moe_opt.dispatchers.say import say
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto_report import plan_lines, settled_lines
from megatron_moe_opt.integration.checks import check_config
from megatron_moe_opt.integration.expert_migration_layer import EXPERTS_COMPUTE
from megatron_moe_opt.integration.layer_workload import layer_workload
from megatron_moe_opt.integration.optimizer_step import after_optimizer_step
from megatron_moe_opt.integration.replicated_tokens import holds_replicated_tokens
from megatron_moe_opt.options import AUTO, PREFIX, Options
from megatron_moe_opt.planning.cluster import Cluster
from megatron_moe_opt.planning.layer_workload import LayerWorkload
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.planner import ALLTOALL, Prediction, Refusal, best, candidates
from megatron_moe_opt.planning.skew import most_uneven_layer
from megatron_moe_opt.planning.trials import Trials
from megatron_moe_opt.runtime.collectives import device_of
from megatron_moe_opt.runtime.recomputation import is_recomputing
from megatron_moe_opt.topology.domain_groups import levels_of
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.variants import split_variant

Plug = Callable[[Any, str, Options], None]
"""Puts the dispatcher of a name, with these options, into a MoE layer."""

REPLICATED_START = "monta:O1"  # what runs first where stock refuses to train


class PlannedLayer:
    """A MoE layer, and the dispatchers that it has had."""

    def __init__(self, layer: Any, groups: ExpertGroups, options: Options, plug: Plug) -> None:
        self.layer, self.groups, self.options = layer, groups, options
        self.passes = self.rows = self.tokens = 0
        """Forward passes in training; rows that they computed here, together; the most tokens that one had."""
        self.current = ALLTOALL
        self._plug = plug
        self._built: dict[str, tuple[Any, Any]] = {ALLTOALL: (layer.token_dispatcher, None)}
        layer.register_forward_pre_hook(self._see_tokens)
        layer.experts.register_forward_pre_hook(self._see_rows)

    def use(self, variant: str) -> None:
        """Has the next passes run under this variant. A collective call over the layer's groups at its first use."""
        layer = self.layer
        if variant not in self._built:
            self._restore(ALLTOALL)
            name, options = split_variant(variant, None)
            ours = self.options
            common = {"network_levels": ours.network_levels, "prefetch_layers": ours.prefetch_layers}
            if options.experts_may_travel:
                common["resident_layers"] = ours.resident_layers
            self._plug(layer, name, dataclasses.replace(options, **common))
            self._built[variant] = layer.token_dispatcher, layer.__dict__.get(EXPERTS_COMPUTE)
        self._restore(variant)

    def keep(self, variants: Iterable[str]) -> None:
        """Forgets the dispatchers of other variants, and what they hold; the one in use stays."""
        kept = {self.current, *variants}
        self._built = {variant: built for variant, built in self._built.items() if variant in kept}

    def workload(self) -> LayerWorkload:
        """Of one micro-batch, routed evenly."""
        return layer_workload(self.layer.config, self.groups, self._workers(), self.tokens)

    def _workers(self) -> tuple[int, ...]:
        """Of each network level; none where nodes make no levels, so that no expert migrates."""
        try:
            return levels_of(self.groups.ep, self.options.network_levels)
        except ConfigurationError:
            if self.options.network_levels is not None:
                raise
            return ()

    def _restore(self, variant: str) -> None:
        self.layer.token_dispatcher, compute = self._built[variant]
        self.layer.__dict__.pop(EXPERTS_COMPUTE, None)
        if compute is not None:
            setattr(self.layer, EXPERTS_COMPUTE, compute)
        self.current = variant

    def _see_tokens(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        if layer.training and inputs and not is_recomputing():
            self.passes += 1
            self.tokens = max(self.tokens, inputs[0].shape[:-1].numel())

    def _see_rows(self, experts: Any, inputs: tuple[Any, ...] | None) -> None:
        # Called without inputs by expert_migration_layer._finish_parameter_sync.
        if inputs and experts.training and not is_recomputing():
            self.rows += inputs[0].size(0)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one layer of one rank was seen to do in a step."""

    workload: LayerWorkload
    rows: float
    """Of a pass."""


class Controller:
    """All planned layers of a process. Every rank of the world has one, and calls it alike."""

    def __init__(self, config: Any, options: Options) -> None:
        self.config, self.options = config, options
        self.layers: list[PlannedLayer] = []
        self.plan: Plan | None = None if options.plan is None else Plan.load(options.plan)
        if self.plan is not None:
            self._check_planned(self.plan)
        self.predicted: tuple[Prediction, ...] = ()
        self.refused: tuple[Refusal, ...] = ()
        self.planned: str | None = None
        """The variant that was planned for all layers; None: not yet, or not the same one for all."""
        self.measured: dict[str, float] = {}
        """Seconds of a training step under each variant that was tried."""
        self.overhead = 0.0
        """Seconds that the trials took longer than as many steps of what stays."""
        self.passes_of_step = 0
        """Forward passes of the layers of this rank in the first step."""
        self.settled = False
        self.trials: Trials | None = None
        """None: not yet, or none."""
        self._step_began: float | None = None

    @property
    def current(self) -> str | None:
        """The variant of the layers of this rank."""
        return self.layers[0].current if self.layers else None

    def add(self, layer: PlannedLayer) -> None:
        """Takes a layer that has just been built; by a plan.json, it runs as planned from the start."""
        self.layers.append(layer)
        if self.plan is None:
            agreed_cluster(self.options.profile, layer.groups)  # refuses now what could not be planned with later
            if holds_replicated_tokens(layer.layer.config):
                layer.use(REPLICATED_START)
            return
        config = layer.layer.config
        sizes = {"ep": layer.groups.ep_size, "etp": layer.groups.etp_size, "experts": config.num_moe_experts}
        self.plan.check(self.options.plan, **sizes)
        variants = set(self.plan.layers.values())
        if len(variants) == 1:
            layer.use(*variants)
        elif "netmoe" in variants:
            raise ConfigurationError(
                f"--moe-opt-plan {self.options.plan} has netmoe in some layers only, but samples move through all of a "
                "stage: plan it for all, or for none"
            )
        else:

            def use_planned(*_: Any) -> None:  # at the first pass: a layer gets its number after it is built
                handle.remove()
                layer.use(self.plan.variant_of(layer.layer.layer_number, self.options.plan))

            handle = layer.layer.register_forward_pre_hook(use_planned)

    def after_step(self) -> None:
        """To be called when an optimizer step has ended. A collective call over the world until the choice is made."""
        if self.settled:
            return
        if self.trials is None:
            self._begin()
        else:
            self._synchronize()
            self.trials.record(self._slowest(time.perf_counter() - self._step_began))
        if self.trials is not None:
            if self.trials.current is None:
                self._settle()
            else:
                self._use(self.trials.current)
                self._keep((ALLTOALL, *self.trials.variants))  # stock's: the others are built from it
                self._synchronize()
                self._step_began = time.perf_counter()

    def after_skipped_step(self) -> None:
        """To be called when an optimizer has skipped a step, whose passes and time are no other step's."""
        if self.settled:
            return
        for layer in self.layers:
            layer.passes = layer.rows = layer.tokens = 0
        self._synchronize()
        self._step_began = time.perf_counter()

    def _begin(self) -> None:
        """Plans, and says what is tried."""
        self.passes_of_step = sum(layer.passes for layer in self.layers)
        answers: list[Any] = [None]
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, [self._seen(layer) for layer in self.layers if layer.passes])
        if dist.get_rank() == 0:
            try:
                answers = [self._make_plan(seen)]
            except Exception as error:  # whatever it is, the others must not wait for this rank for ever
                answers = [error]
        dist.broadcast_object_list(answers, src=0)
        if isinstance(answers[0], Exception):
            raise answers[0]
        self.predicted, self.refused, self.planned = answers[0]
        if self.planned is None:
            self.settled = True  # a plan that differs from layer to layer, or cannot be left: it runs as it is
            return
        self.trials = Trials(self.predicted, self.planned)
        for line in plan_lines(self):
            say(AUTO, line)

    def _seen(self, layer: PlannedLayer) -> Seen:
        return Seen(layer.workload(), layer.rows / layer.passes)

    def _make_plan(
        self, seen: Sequence[Sequence[Seen]]
    ) -> tuple[tuple[Prediction, ...], tuple[Refusal, ...], str | None]:
        """Predictions of all layers together, what was refused, and what is planned. On rank 0.

        Args:
            seen: of each rank's layers, in their order.
        """
        if self.plan is not None:
            variants = set(self.plan.layers.values())
            workers = {one.workload.workers for of_rank in seen for one in of_rank}
            allowed, refused = self._allowed(self.plan.candidates, workers)
            switchable = len(variants) == 1 and variants <= {one.variant for one in allowed}
            return allowed, refused, variants.pop() if switchable else None
        if not any(seen):
            raise ConfigurationError("--moe-token-dispatcher-type auto: no MoE layer has run in the first step")
        cluster = Cluster.load(self.options.profile)
        by_shape: dict[LayerWorkload, list[list[Seen]]] = {}
        for rank, of_rank in enumerate(seen):
            for one in of_rank:
                shape = dataclasses.replace(one.workload, tokens=0)
                by_shape.setdefault(shape, [[] for _ in seen])[rank].append(one)
        totals: dict[str, list[Prediction]] = {}
        refused: dict[str, Refusal] = {}
        for of_ranks in by_shape.values():
            alike = [one for of_rank in of_ranks for one in of_rank]
            rows = [one.rows for one in alike]
            imbalance = max(1.0, max(rows) * len(rows) / sum(rows)) if sum(rows) else 1.0
            workload = dataclasses.replace(
                alike[0].workload,
                tokens=max(one.workload.tokens for one in alike),
                imbalance=imbalance,
                rank_rows=most_uneven_layer([[one.rows for one in of_rank] for of_rank in of_ranks]),
            )
            found, not_here = candidates(workload, cluster, self.options.activation_budget)
            for one in found:
                totals.setdefault(one.variant, []).append(one)
            refused |= {one.variant: one for one in not_here}
        everywhere = [_sum(ones) for ones in totals.values() if len(ones) == len(by_shape)]
        in_order = sorted(everywhere, key=lambda one: one.seconds)
        allowed, not_allowed = self._allowed(in_order, {workload.workers for workload in by_shape})
        return allowed, (*refused.values(), *not_allowed), best(allowed).variant

    def _check_planned(self, plan: Plan) -> None:
        """Refuses now, as for a dispatcher that the user names, what this configuration cannot run."""
        for variant in dict.fromkeys(plan.layers.values()):
            reason = self._refusal(variant)
            if reason is not None:
                raise ConfigurationError(f"{PREFIX}plan {self.options.plan} runs {variant}: {reason}")

    def _allowed(
        self, predictions: Sequence[Prediction], workers: set[tuple[int, ...]]
    ) -> tuple[tuple[Prediction, ...], tuple[Refusal, ...]]:
        """What layers can change to and from in this configuration, and what they cannot.

        Args:
            workers: of each network level of the expert-parallel groups, as this run finds them.
        """
        reasons = [self._refusal(one.variant) or _stays(one.variant, workers) for one in predictions]
        found = list(zip(predictions, reasons, strict=True))
        allowed = tuple(one for one, reason in found if reason is None)
        return allowed, tuple(Refusal(one.variant, reason) for one, reason in found if reason is not None)

    def _refusal(self, variant: str) -> str | None:
        """Why this configuration cannot run a variant."""
        if variant == ALLTOALL:
            if holds_replicated_tokens(self.config):
                return "stock Megatron does not train MoE layers under TP without --sequence-parallel: add it"
            return None
        name, options = split_variant(variant, None)
        try:
            check_config(self.config, name, options)
        except ConfigurationError as error:
            return str(error)
        return None

    def _use(self, variant: str) -> None:
        for layer in self.layers:
            layer.use(variant)

    def _keep(self, variants: Iterable[str]) -> None:
        for layer in self.layers:
            layer.keep(variants)

    def _settle(self) -> None:
        trials, chosen = self.trials, self.trials.choice
        self.measured = trials.medians()
        self.overhead = trials.longer_than(self.measured[chosen])
        self._use(chosen)
        self._keep((chosen,))
        self.settled = True
        for line in settled_lines(self, chosen):
            say(AUTO, line)

    def _slowest(self, seconds: float) -> float:
        """The largest of all ranks'."""
        time_of_step = torch.tensor(seconds, dtype=torch.float64, device=device_of(dist.group.WORLD))
        dist.all_reduce(time_of_step, dist.ReduceOp.MAX)
        return time_of_step.item()

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _stays(variant: str, workers: set[tuple[int, ...]]) -> str | None:
    """Why layers cannot change to a variant, or from it."""
    name, options = split_variant(variant, None)
    if name == "netmoe" or variant == "parm:S2":
        what = "moves samples between layers" if name == "netmoe" else "splits rows instead of tokens"
        return f"{what}, which layers cannot change to: choose --moe-token-dispatcher-type {name}"
    sizes = options.domain_sizes
    if sizes is not None and any(
        len(sizes) != len(levels) or any(number % size for number, size in zip(levels, sizes, strict=True))
        for levels in workers
    ):
        return f"the network levels of this run have other numbers of workers: name them with {PREFIX}levels"
    return None


def _sum(ones: list[Prediction]) -> Prediction:
    """Of the layers of all shapes."""
    first, *others = ones
    for other in others:
        names = {*first.terms, *other.terms}
        first = Prediction(
            first.variant,
            first.seconds + other.seconds,
            first.exposed + other.exposed,
            first.inter_bytes + other.inter_bytes,
            first.intra_bytes + other.intra_bytes,
            max(first.activation_bytes, other.activation_bytes),
            {name: first.terms.get(name, 0.0) + other.terms.get(name, 0.0) for name in names},
        )
    return first


_controller: Controller | None = None


def new_controller() -> None:
    """Layers that are built from now on are planned by themselves."""
    global _controller
    _controller = None


def controller_of(config: Any, options: Options) -> Controller:
    """The controller of the layers that are being built; every rank that builds a configuration with `auto` has it."""
    global _controller
    if _controller is None:
        _controller = Controller(config, options)
        after_optimizer_step(_after_step)
        after_optimizer_step(_after_skipped_step, updated=False)
    return _controller


def current_controller() -> Controller | None:
    """Of the layers that were built last; None where none of them is planned."""
    return _controller


def plan_layer(layer: Any, groups: ExpertGroups, options: Options, plug: Plug) -> None:
    """Has a MoE layer that Megatron has just built, with its stock dispatcher, planned."""
    controller_of(layer.config, options).add(PlannedLayer(layer, groups, options, plug))


def _after_step() -> None:
    if _controller is not None:
        _controller.after_step()


def _after_skipped_step() -> None:
    if _controller is not None:
        _controller.after_skipped_step()
