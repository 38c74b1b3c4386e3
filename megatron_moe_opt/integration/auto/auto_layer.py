"""`auto`: MoE layers whose dispatcher is planned, tried and then kept.

    step 1           stock runs, and the layers see how many rows they have and how unevenly (with a plan.json the plan)
    after step 1     all ranks tell each other what they saw (first_step.py)
                     without a profile all ranks measure what moves cost, or rank 0 reads what a run like this one has
                     measured (own_profile.py)
                     rank 0 ranks all candidates by the profile (planning/planner.py) and tells the others
    steps 2 to n     the plan, stock and the runners-up take turns, ever fewer of them (planning/choosing/trials.py)
    from then on     the fastest runs, by the slowest rank's times, on all ranks; when steps have come to take another
                     time (planning/choosing/drift.py), trials begin again

Beside them Megatron's own allgather and, where installed, flex are tried, which nobody predicts (stock_variants.py).

All candidates compute the same function, so that training does not notice. Dispatchers are exchanged between optimizer
steps only: no pass of theirs is under way then, and recomputed passes find what their first run used. None that loses
information is a candidate, but with --moe-opt-allow-lossy those whose rows are rounded on the wire.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_moe_opt.dispatchers.pipelining import agreed_cluster
from megatron_moe_opt.dispatchers.say import say
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto.auto_report import drift_line, plan_lines, settled_lines
from megatron_moe_opt.integration.auto.first_step import (
    Alike,
    FirstStep,
    Seen,
    of_all,
    refusal,
    tried_by_plan,
    tried_by_profile,
)
from megatron_moe_opt.integration.auto.given_plan import read_plan
from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer, Plug
from megatron_moe_opt.integration.auto.sample_saving import SampleRouting, keeps_home, saving_of
from megatron_moe_opt.integration.auto.stock_variants import is_stock_variant, release_buffers
from megatron_moe_opt.integration.layer.configured_workload import layer_workload
from megatron_moe_opt.integration.layer.netmoe_layer import check_seams, link
from megatron_moe_opt.integration.layer.overlapped_batches import before_pass
from megatron_moe_opt.integration.layer.replicated_tokens import holds_replicated_tokens
from megatron_moe_opt.integration.optimizer_step import after_optimizer_step
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.choosing.drift import Drift
from megatron_moe_opt.planning.choosing.trials import Trials
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, Prediction, Refusal
from megatron_moe_opt.runtime.engine.collectives import device_of
from megatron_moe_opt.runtime.job.agreement import found_by_first
from megatron_moe_opt.systems import moves_samples
from megatron_moe_opt.systems.netmoe import NETMOE
from megatron_moe_opt.systems.system import PREFIX, PROFILE_SECONDS
from megatron_moe_opt.topology.domain_groups import release_domain_groups
from megatron_moe_opt.topology.expert_groups import ExpertGroups

if TYPE_CHECKING:
    from megatron_moe_opt.integration.auto.own_profile import OwnProfile

MOST_OF_FREE = 0.8
"""Of the memory that was free at the peak of the first step: other steps, and fragments, may take more."""
REPLICATED_START = "monta:O1"  # what runs first where stock refuses to train


class Controller:
    """All planned layers of a process. Every rank of the world has one, and calls it alike."""

    def __init__(self, config: Any, options: Options) -> None:
        self.config, self.options = config, options
        self.layers: list[PlannedLayer] = []
        self.plan: Plan | None = None
        """The plan of --moe-opt-plan; None: there is none, or it was not read yet."""
        self._routing: list[SampleRouting] = []
        """Of each layer, in the first step, where `netmoe` could run."""
        self.first_step: FirstStep | None = None
        """What all ranks saw in it; None: not yet."""
        self.own_profile: OwnProfile | None = None
        """What this run has measured itself; None: not yet, or it is given a profile or a plan."""
        self.shapes: tuple[Alike, ...] = ()
        """That the layers have, with what takes longest first; they are tried one after the other."""
        self.trying: Alike | None = None
        """That of `shapes` whose trials are under way, or were the last. None: not yet."""
        self._number = 0
        """Index of `trying` in `shapes`."""
        self.planned: str | None = None
        """The variant that was planned for them; None: not yet, or not the same one for all layers."""
        self.measured: dict[str, float] = {}
        """Seconds of a training step under each variant that was tried in them."""
        self.overhead = 0.0
        """Seconds that trials took longer than as many steps of what stays."""
        self.settled = False
        self.trials: Trials | None = None
        """The trials under way; None: they have not begun, or there are none."""
        self.chosen: dict[int, str] = {}
        """What the last trials have chosen, by the number of the shape. Ranks without layers know it too."""
        self._drift: Drift | None = None
        """Watches the steps after the last trials; None: there were none."""
        self._plan_is_agreed = False
        self._step_began: float | None = None
        """When the first pass of the step that is under way did; None: no layer has run in it yet."""
        if options.plan is not None:
            if dist.is_initialized():
                self._agree_on_plan(dist.group.WORLD)
            elif os.environ.get("RANK", "0") == "0":  # refuses now; the others ask when there are process groups
                self.plan = self._read_plan()

    @property
    def current(self) -> str | None:
        """The variant of the layers of this rank."""
        return self.layers[0].current if self.layers else None

    def add(self, layer: PlannedLayer) -> None:
        """Takes a layer that has just been built; by a plan.json, it runs as planned from the start."""
        self.layers.append(layer)
        before_pass(layer.layer, self._begin_step)
        if self.options.plan is None:
            if self.options.profile is not None:
                # refuses now what could not be planned with later
                agreed_cluster(layer.groups, self.options.profile, layer_workload(layer.layer.config, layer.groups))
            if refusal(self.config, NETMOE.name) is None:
                self._routing.append(SampleRouting(layer.layer.router))
            if holds_replicated_tokens(layer.layer.config):
                layer.use(REPLICATED_START)
            return
        if not self._plan_is_agreed:
            self._agree_on_plan(layer.groups.joint)
        variants = set(self.plan.layers.values())
        if len(variants) == 1:
            layer.use(*variants)
        elif moving := [one for one in variants if moves_samples(one)]:
            raise ConfigurationError(
                f"--moe-opt-plan {self.options.plan} has {moving[0]} in some layers only, but samples move through all "
                "of a stage: plan it for all, or for none"
            )
        else:

            def use_planned(*_: Any) -> None:  # at the first pass: a layer gets its number after it is built
                handle.remove()
                layer.use(self.plan.variant_of(layer.layer.layer_number, self.options.plan))

            handle = before_pass(layer.layer, use_planned)

    def after_step(self) -> None:
        """To be called when an optimizer step has ended. A collective call over the world until the choice is made, and
        then every so many steps.
        """
        if self.settled:
            self._watch()
            return
        if self.trials is None:
            self._begin()
        else:
            self._synchronize()
            self.trials.record(self._slowest(self._step_seconds()))
        if self.trials is not None:
            if self.trials.current is None:
                self._settle()
            else:
                self._try()

    def after_skipped_step(self) -> None:
        """To be called when an optimizer has skipped a step, whose passes and time are no other step's."""
        self._step_began = None
        if not self.settled:
            for layer in self.layers:
                layer.passes = layer.rows = layer.tokens = 0

    def _begin_step(self, layer: Any, _: Any) -> None:
        """Has a step timed from here on: an evaluation or a checkpoint between two of them is not theirs."""
        if self.trials is not None and self._step_began is None and layer.training:
            if not self.settled:
                self._synchronize()
            self._step_began = time.perf_counter()

    def _step_seconds(self) -> float:
        """Of the step that ends, on this rank; 0 where no layer has run."""
        began, self._step_began = self._step_began, None
        return 0.0 if began is None else time.perf_counter() - began

    def _begin(self) -> None:
        """Plans the trials, and says what is tried."""
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, self._first_step_here())
        self.first_step = of_all(of_ranks)
        if self.options.profile is None and self.options.plan is None:
            self._measure([one.workload for of_rank in self.first_step.seen for one in of_rank])
        self.shapes = found_by_first(lambda: self._make_plan(self.first_step), dist.group.WORLD)
        if self.shapes[0].planned is None:
            self.settled = True  # a plan that differs from layer to layer, or cannot be left: it runs as it is
            return
        self._begin_trials(0)
        for line in plan_lines(self):
            say(AUTO, line)

    @property
    def predicted(self) -> tuple[Prediction, ...]:
        """Returns the predictions of what is tried, or was tried last."""
        return () if self.trying is None else self.trying.predicted

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Returns the refusals of what could have been tried besides."""
        return () if self.trying is None else self.trying.refused

    def _begin_trials(self, number: int) -> None:
        """Tries what is planned for the layers of a shape, or was chosen before; the others run what they do."""
        self._number, self.trying = number, self.shapes[number]
        self.planned = self.chosen.get(number, self.trying.planned)
        self.trials = Trials(self.trying.predicted, self.planned, len(self.shapes), self.trying.beside)

    def _measure(self, workloads: Sequence[LayerWorkload]) -> None:
        from megatron_moe_opt.integration.auto.own_profile import own_profile  # which imports Megatron

        seconds = self.options.profile_seconds or PROFILE_SECONDS
        self.own_profile = own_profile(self.config, workloads, seconds)

    def _first_step_here(self) -> FirstStep:
        """What this rank saw."""
        seen = tuple(Seen(one.workload(), one.rows / one.passes, one.passes) for one in self.layers if one.passes)
        spare = _free_memory()
        return FirstStep((seen,), self._room(spare), spare, *self._samples())

    def _samples(self) -> tuple[float | None, str | None]:
        """See saving_of and keeps_home; of this rank's layers, whose routers are listened to no more."""
        if not self._routing:
            return None, None
        heard, self._routing = self._routing, []
        routing, layer, groups = [one.take() for one in heard], self.layers[0].layer, self.layers[0].groups
        at_home = keeps_home(self.config, heard)
        try:
            check_seams(layer, self.options)
            blocks = self.config.virtual_pipeline_model_parallel_size or 1
            return saving_of(routing, layer.router.tp_cp_group, groups, blocks), at_home
        except ConfigurationError as error:  # on all ranks of the group
            return None, str(error)

    def _room(self, free: int | None) -> int | None:
        """Bytes that each pass of a layer of this rank may hold besides what stock's held in the first step."""
        in_flight = self.config.pipeline_model_parallel_size * (self.config.virtual_pipeline_model_parallel_size or 1)
        held = sum(min(layer.passes, in_flight) for layer in self.layers)
        return None if free is None or held == 0 else free // held

    def _make_plan(self, first: FirstStep) -> tuple[Alike, ...]:
        """What is tried in the layers of each shape, those first that take most time. On rank 0."""
        if self.plan is not None:
            return (tried_by_plan(self.plan, self.config, first),)
        own = self.own_profile
        cluster = Cluster.load(self.options.profile) if own is None else own.cluster
        return tried_by_profile(cluster, self.config, self.options, first)

    def _agree_on_plan(self, group: dist.ProcessGroup) -> None:
        """Has all ranks of the group run what the first one reads: other nodes may not have the file."""
        self.plan, self._plan_is_agreed = found_by_first(self._read_plan, group), True

    def _read_plan(self) -> Plan:
        """Refuses now, as for a dispatcher that the user names, what this configuration cannot run."""
        plan = read_plan(self.options.plan, self.config)
        for variant in dict.fromkeys(plan.layers.values()):
            reason = refusal(self.config, variant)
            if reason is not None:
                raise ConfigurationError(f"{PREFIX}plan {self.options.plan} runs {variant}: {reason}")
        return plan

    @property
    def _tried_layers(self) -> list[PlannedLayer]:
        shape = self.trying.shape
        return [layer for layer in self.layers if shape is None or layer.shape == shape]

    def _use(self, variant: str) -> None:
        for layer in self._tried_layers:
            layer.use(variant)
        if moves_samples(variant):
            link(layer.layer for layer in self._tried_layers)

    def _keep(self, variants: Iterable[str]) -> None:
        """Forgets the dispatchers of other variants, and has their process groups destroyed: a collective call."""
        forgotten = {layer: gone for layer in self._tried_layers if (gone := layer.keep(variants))}
        for group in dict.fromkeys(layer.groups.ep for layer in forgotten):
            release_domain_groups(group)
        for variant in set().union(*forgotten.values()):
            if is_stock_variant(variant) and not any(layer.current == variant for layer in self.layers):
                release_buffers(variant)

    def _try(self) -> None:
        self._use(self.trials.current)
        self._keep((ALLTOALL, *self.trials.variants))  # stock's: the others are built from it

    def _watch(self) -> None:
        """Begins trials again where steps have come to take another time. Nothing waits for the device, but once a
        window: the optimizer's step does, for the norm of the gradients.
        """
        median = None if self._drift is None else self._drift.record(self._step_seconds())
        if median is None:
            return
        median = self._slowest(median)
        if self._drift.is_over(median):
            say(AUTO, drift_line(self, median, self._drift.usual))
            self.settled, self.overhead = False, 0.0
            self._begin_trials(0)
            self._try()

    def _settle(self) -> None:
        trials, chosen = self.trials, self.trials.choice
        self.measured = trials.medians()
        self.overhead += trials.longer_than(self.measured[chosen])
        self.chosen[self._number] = chosen
        self._use(chosen)
        self._keep((chosen,))
        for line in settled_lines(self, chosen):
            say(AUTO, line)
        if self._number + 1 < len(self.shapes):
            self._begin_trials(self._number + 1)
            self._try()
        else:
            self.settled = True
            self._drift, self._step_began = Drift(self.overhead), None

    def _slowest(self, seconds: float) -> float:
        """Returns the largest value of all ranks."""
        time_of_step = torch.tensor(seconds, dtype=torch.float64, device=device_of(dist.group.WORLD))
        dist.all_reduce(time_of_step, dist.ReduceOp.MAX)
        return time_of_step.item()  # host synchronisation: in trials, and once a window of Drift

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # host synchronisation: in trials alone, around a step that is timed


def _free_memory() -> int | None:
    """Bytes of this rank's GPU that may be planned with, of those that were free when most was in use; None without a
    GPU, where the host's may be swapped.
    """
    if not torch.cuda.is_available():
        return None
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
    return int(free * MOST_OF_FREE)


_controller: Controller | None = None


def new_controller() -> None:
    """Layers that are built from now on are planned by themselves."""
    global _controller
    _controller = None


@contextmanager
def controller_aside() -> Iterator[None]:
    """Layers that are built inside the block are none of the present controller's."""
    global _controller
    outside, _controller = _controller, None
    try:
        yield
    finally:
        _controller = outside


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
