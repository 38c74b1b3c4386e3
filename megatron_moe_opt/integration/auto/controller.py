"""What `auto` does between steps: the layers' dispatchers are planned, tried and then kept.

    step 1           stock runs, and the layers see how many rows they have and how unevenly (with a plan.json the plan)
    after step 1     all ranks tell each other what they saw (look.py, first_step.py)
                     without a profile all ranks measure what moves cost, or rank 0 reads what a run like this one has
                     measured (own_profile.py)
                     rank 0 ranks all candidates by the profile (planning/planner.py) and tells the others
    steps 2 to n     the plan, stock and the runners-up take turns, ever fewer of them (planning/choosing/trials.py)
    from then on     the fastest runs, by the slowest rank's times, on all ranks; when steps have come to take another
                     time, and after 1,000 of them, 10,000 and so on (planning/choosing/drift.py), a step runs as the
                     first one did, and what it shows is planned by and tried

Beside them Megatron's own allgather and, where installed, flex are tried, which nobody predicts (stock_variants.py).
What a GPU has no room for is not tried (memory_room.py), nor what an earlier start has ended in (first_turns.py).

All candidates compute the same function, so that training does not notice. Dispatchers are exchanged between optimizer
steps only: no pass of theirs is under way then, and recomputed passes find what their first run used. None that loses
information is a candidate, but with --moe-opt-allow-lossy those whose rows are rounded on the wire.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_moe_opt.dispatchers.agreed_profile import agreed_cluster
from megatron_moe_opt.dispatchers.say import say, say_once
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto import memory_room
from megatron_moe_opt.integration.auto.auto_report import (
    changed_line,
    later_layers_line,
    no_layer_line,
    no_room_line,
    no_start_line,
    plan_lines,
    settled_lines,
)
from megatron_moe_opt.integration.auto.first_step import (
    Alike,
    FirstStep,
    of_all,
    refusal,
    runs_first,
    tried_by_plan,
    tried_by_profile,
)
from megatron_moe_opt.integration.auto.first_turns import FirstTurns
from megatron_moe_opt.integration.auto.given_plan import read_plan
from megatron_moe_opt.integration.auto.look import Look, passes_held
from megatron_moe_opt.integration.auto.memory_room import Above
from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer
from megatron_moe_opt.integration.auto.step_clock import StepClock
from megatron_moe_opt.integration.auto.stock_variants import (
    failure_to_start,
    is_stock_variant,
    missing_package,
    needs_as_many_tokens,
    release_buffers,
    stock_refusal,
)
from megatron_moe_opt.integration.layer.configured_workload import layer_workload
from megatron_moe_opt.integration.layer.layer_passes import number_of
from megatron_moe_opt.integration.layer.linked_blocks import link
from megatron_moe_opt.integration.layer.overlapped_batches import before_pass, note_stock
from megatron_moe_opt.integration.micro_batches import after_passes, later_micro_batches, trains
from megatron_moe_opt.integration.training_arguments import training_arguments
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.choosing.drift import Drift, first_look
from megatron_moe_opt.planning.choosing.trials import Trials
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, Prediction
from megatron_moe_opt.row_format import SAME
from megatron_moe_opt.runtime.engine.collectives import device_of
from megatron_moe_opt.systems import moves_samples
from megatron_moe_opt.systems.system import PREFIX, PROFILE_SECONDS
from megatron_moe_opt.topology.agreement import found_by_first, known_to_all, largest_of_ranks
from megatron_moe_opt.topology.domain_groups import release_domain_groups
from megatron_moe_opt.topology.process_groups import is_destroyed
from megatron_moe_opt.variants import split_variant

if TYPE_CHECKING:
    from megatron_moe_opt.integration.auto.own_profile import OwnProfile


class Controller:
    """All planned layers of a process. Every rank of the world has one, and calls it alike."""

    def __init__(self, config: Any, options: Options) -> None:
        self.config, self.options = config, options
        self.layers: list[PlannedLayer] = []
        self.model: int | None = None
        """The number of the model whose steps are looked at and timed; None: none has ended, or it is not known."""
        self.plan: Plan | None = None
        """The plan of --moe-opt-plan; None: there is none, or it was not read yet."""
        self._look = Look(config, options)
        """Looks at the step that the plan is made by."""
        self.first_step: FirstStep | None = None
        """What all ranks saw in the step that was looked at, the first or a later one
        that ran like it; None: not yet.
        """
        self.own_profile: OwnProfile | None = None
        """What this run has measured itself; None: not yet, or it is given a profile or a plan."""
        self.shapes: tuple[Alike, ...] = ()
        """The shapes that the layers have, the one that takes longest first; they are tried one after the other."""
        self.trying: Alike | None = None
        """The one of `shapes` whose trials are under way, or were the last. None: not yet."""
        self.measured: dict[str, float] = {}
        """Seconds of a training step under each variant that was tried in them."""
        self.overhead = 0.0
        """Seconds that trials took longer than as many steps of what stays."""
        self.settled = False
        self.trials: Trials | None = None
        """The trials under way; None: they have not begun, or there are none."""
        self.chosen: dict[LayerWorkload | None, str] = {}
        """What the last trials have chosen, by the shape of the layers. Ranks without layers know it too."""
        self._fitting: set[str] = set()
        """The variants that all GPUs are known to have room for, beside what has run its first turn so far."""
        self._starting: set[str] = set()
        """The variants of Megatron's own that were found to start on all ranks since the trials began."""
        self._first_turns: FirstTurns | None = None
        """What runs its first steps, on rank 0, where it is written down; None: elsewhere, and before trials."""
        self._drift: Drift | None = None
        """Watches the steps after the last trials; None: there were none."""
        self._plan_is_agreed = False
        self._world: dist.ProcessGroup | None = dist.group.WORLD
        """All ranks, between which layers were built or trained; None: not yet."""
        stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
        self.clock = StepClock(self._now, stages, chunks)
        after_passes(self._passes_end)
        if options.plan is not None:
            if dist.is_initialized():
                self._agree_on_plan(dist.group.WORLD)
            elif os.environ.get("RANK", "0") == "0":  # refuses now; the others ask when there are process groups
                self.plan = self._read_plan()

    @property
    def current(self) -> str | None:
        """Returns the variant that the layers of this rank run; None: this rank has no such layers."""
        return self.layers[0].current if self.layers else None

    def note_world(self) -> None:
        """Learns between which ranks this is, once there are process groups."""
        if self._world is None:
            self._world = dist.group.WORLD

    def is_over(self) -> bool:
        """Whether all process groups have been destroyed since, as between two trainings in one process."""
        return self._world is not None and is_destroyed(self._world)

    def add(self, layer: PlannedLayer) -> None:
        """Takes a layer that has just been built; by a plan.json, it runs as planned from the start."""
        if self.options.plan is self.options.profile is None:
            from megatron_moe_opt.integration.auto.own_profile import check_groups  # which imports Megatron

            check_groups()
        self.note_world()
        if self.first_step is not None:
            say_once(AUTO, "later layers", later_layers_line)
        self.layers.append(layer)
        if self.options.network_levels is not None:
            layer.workers()  # refuses now what the ranks do not lie in
        self._look.at([layer])
        before_pass(layer.layer, lambda module, _: self.clock.layer_begins(trains(module)))
        if self.options.plan is None:
            if self.options.profile is not None:
                # refuses now what could not be planned with later
                agreed_cluster(layer.groups, self.options.profile, layer_workload(layer.layer.config, layer.groups))
            if (first := runs_first(layer.layer.config)) != layer.current:
                layer.use(first)
            self._note_stock()
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
                number = min(number_of(layer.layer), max(self.plan.layers))  # multi-token prediction: as the last one
                layer.use(self.plan.variant_of(number, self.options.plan))

            handle = before_pass(layer.layer, use_planned)

    def after_step(self) -> None:
        """Goes on with looking, planning and trying; called when an optimizer step has ended. A collective call over
        the world until the choice is made, and then every so many steps.
        """
        if self.settled:
            self._watch()
            return
        self._synchronize()
        if self.trials is None:
            self._begin()
        else:
            seconds = self._largest(self.clock.take())
            if not seconds:
                return  # no layer has run on any rank: another model's step
            self.trials.record(seconds)
        if self.trials is not None:
            self._go_on()

    def after_skipped_step(self) -> None:
        """Leaves out a step that the optimizer has skipped: its passes and its time are no other step's."""
        self.clock.forget()
        if not self.settled and self.trials is None:
            self._look.again()

    def _passes_end(self) -> None:
        if not self.settled:  # the host would have to wait for the device
            self.clock.passes_end()

    def _now(self) -> float:
        if not self.settled:
            self._synchronize()
        return time.perf_counter()

    def _begin(self) -> None:
        """Plans the trials by the step that has just run, and says what is tried; where no layer has run in it on any
        rank, it was another model's, and the next one is looked at.
        """
        if not self._largest(float(any(layer.passes for layer in self.layers))):
            say_once(AUTO, "no layer", no_layer_line)
            self.clock.others_step_ended()
            self.model = None
            return
        before, planned = self.first_step, self.shapes
        began = time.perf_counter() if self.clock.began is None else self.clock.began
        self.clock.forget()
        self.first_step = of_all(known_to_all(self._look.taken()))
        if self.options.profile is None and self.options.plan is None and self.own_profile is None:
            self._measure(self.first_step.workloads)
        try:
            self.shapes = found_by_first(lambda: self._make_plan(self.first_step), dist.group.WORLD)
        except ConfigurationError as error:
            if before is None:
                raise
            say(AUTO, f"nothing was planned anew ({error}); what was chosen before runs on")
            self.first_step = before
            for one in self.shapes:
                self._run_only(self.chosen[one.shape], self._layers_of(one))
            self._rest()
            return
        if self.shapes[0].planned is None:
            self.settled = True  # a plan that differs from layer to layer, or cannot be left: it runs as it is
            return
        self.overhead = 0.0
        if before is not None:  # the first time there is nothing yet that it would hold up
            self.overhead = self._largest(time.perf_counter() - began)
            say(AUTO, changed_line(planned, self.shapes, before, self.first_step))
        self._begin_trials(0)
        for line in plan_lines(self):
            say(AUTO, line)

    @property
    def predicted(self) -> tuple[Prediction, ...]:
        """Returns the predictions of what is tried, or was tried last."""
        return () if self.trying is None else self.trying.predicted

    def _begin_trials(self, number: int) -> None:
        """Tries what is planned for the layers of a shape, and was chosen before; the others run what they do."""
        self.trying = one = self.shapes[number]
        self._fitting, self._starting = {one.ran}, set()
        self.trials = Trials(one.predicted, one.planned, len(self.shapes), one.beside, one.kept)

    def _measure(self, workloads: Sequence[LayerWorkload]) -> None:
        from megatron_moe_opt.integration.auto.own_profile import own_profile  # which imports Megatron

        seconds = self.options.profile_seconds or PROFILE_SECONDS
        self.own_profile = own_profile(self.config, workloads, seconds)

    @cached_property
    def _costs(self) -> Cluster:
        """Returns what all plans are made by: what was measured, or --moe-opt-profile, read once. On rank 0."""
        return Cluster.load(self.options.profile) if self.own_profile is None else self.own_profile.cluster

    def _make_plan(self, first: FirstStep) -> tuple[Alike, ...]:
        """Returns what is tried in the layers of each shape, the shape that takes most time first. On rank 0."""
        if self._first_turns is None:
            self._first_turns = FirstTurns()
        left_out = self._first_turns.ended
        if self.plan is not None:
            found = (tried_by_plan(self.plan, self.config, first, left_out),)
        else:
            found = tried_by_profile(self._costs, self.config, self.options, first, left_out)
        return tuple(one.keeping(self.chosen.get(one.shape)) for one in found)

    def _agree_on_plan(self, group: dist.ProcessGroup) -> None:
        """Has all ranks of the group run what the first one reads: other nodes may not have the file."""
        self.plan, self._plan_is_agreed = found_by_first(self._read_plan, group), True

    def _read_plan(self) -> Plan:
        """Refuses now, as for a dispatcher that the user names, what this configuration cannot run."""
        plan = read_plan(self.options.plan, self.config)
        for variant in dict.fromkeys((*plan.layers.values(), *(one.variant for one in plan.candidates))):
            _, options = split_variant(variant, None)
            if options.wire != SAME or options.compression:
                raise ConfigurationError(
                    f"{PREFIX}plan {self.options.plan} has {variant}, which rounds what travels, and {AUTO} trains "
                    "like stock: name that dispatcher and its options in the place of the plan, or take it out"
                )
        for variant in dict.fromkeys(plan.layers.values()):
            reason = refusal(self.config, variant)
            if reason is not None:
                raise ConfigurationError(f"{PREFIX}plan {self.options.plan} runs {variant}: {reason}")
        return plan

    def _layers_of(self, of_shape: Alike) -> list[PlannedLayer]:
        return [layer for layer in self.layers if of_shape.shape is None or layer.shape == of_shape.shape]

    def _is_refused(self, config: Any, variant: str) -> bool:
        """Whether a layer of another configuration, of a second model, cannot run what is tried in all."""
        why_not = stock_refusal if is_stock_variant(variant) else refusal
        return config is not self.config and why_not(config, variant) is not None

    def _use(self, variant: str, layers: Sequence[PlannedLayer]) -> None:
        for layer in layers:
            # Of a layer that has not run nobody knows whether all its passes have as many tokens.
            is_unknown = not layer.passes and needs_as_many_tokens(self.config, variant)
            cannot = is_unknown or self._is_refused(layer.layer.config, variant)
            layer.use(runs_first(layer.layer.config) if cannot else variant)
        if moves_samples(variant):
            link(layer.layer for layer in layers)
        self._note_stock()

    def _note_stock(self) -> None:
        for config in {id(one.layer.config): one.layer.config for one in self.layers}.values():
            note_stock(config, all(one.current == ALLTOALL for one in self.layers if one.layer.config is config))

    def _run_only(self, variant: str, layers: Sequence[PlannedLayer]) -> None:
        """Has the layers run a variant and forget all others: a collective call."""
        self._use(variant, layers)
        self._keep((variant,), layers)

    def _keep(self, variants: Iterable[str], layers: Sequence[PlannedLayer]) -> None:
        """Forgets the dispatchers of other variants, and has their process groups destroyed: a collective call."""
        forgotten = {layer: gone for layer in layers if (gone := layer.keep(variants))}
        for group in dict.fromkeys(layer.groups.ep for layer in forgotten):
            release_domain_groups(group)
        for variant in set().union(*forgotten.values()):
            if is_stock_variant(variant) and not any(layer.current == variant for layer in self.layers):
                release_buffers(variant)

    def _go_on(self) -> None:
        """Has the next step run what the trials say, if GPUs have room for it; or, where they are over, what stays."""
        layers = self._layers_of(self.trying)
        while (variant := self.trials.current) is not None:
            self._write_down(variant)
            if self._fits(variant, layers) and self._starts(variant, layers):
                break
            self.trials.drop()
        if variant is None:
            self._write_down(None)
            self._settle()
            return
        self._use(variant, layers)
        self._keep((ALLTOALL, *self.trials.variants), layers)  # stock's: the others are built from it

    def _write_down(self, variant: str | None) -> None:
        """Has rank 0 write down what may begin now, for the next start, if this one ends in it."""
        if self._first_turns is not None:
            is_new = variant is not None and not self.trials.times[variant] and variant != self.trying.ran
            self._first_turns.run(variant if is_new else None)

    def _fits(self, variant: str, layers: Sequence[PlannedLayer]) -> bool:
        """Whether the GPU of each rank has room for what a variant takes in these layers, beside what the others run.

        A collective call over the world, before a variant's first turn, and the next one of each when another has had
        its first. A rank that ran out of memory in a turn would leave the others in a collective.
        """
        if variant in self._fitting or not self.first_step.rooms:
            return True
        self._use(self.trying.ran, layers)  # as in the step that room is known of
        self._keep((ALLTOALL, *self.trials.variants), layers)
        above = self._held(lambda one, layer: one.above(variant if one is self.trying else layer.current))
        communicators = self.trying.communicators(variant) if layers else 0
        size = self.first_step.rooms[dist.get_rank()].needed(above, communicators)
        of_ranks = known_to_all(None if not size or memory_room.could_take(size) else size)
        lacking = [one for one in of_ranks if one is not None]
        if lacking:
            say(AUTO, no_room_line(variant, lacking, len(of_ranks)))
        elif self.trials.times.get(variant):
            self._fitting.add(variant)
        else:  # it will hold more besides when it has run: the others are asked again
            self._fitting = {self.trying.ran, variant}
        return not lacking

    def _held(self, of_layer: Callable[[Alike, PlannedLayer], Above]) -> int:
        """Returns the bytes that all layers of this rank hold in a step together, of what each holds."""
        later = later_micro_batches()
        return sum(
            of_layer(one, layer).of(passes_held(layer, self.config, later), layers=1)
            for one in self.shapes
            for layer in self._layers_of(one)
        )

    def _starts(self, variant: str, layers: Sequence[PlannedLayer]) -> bool:
        """Whether each rank can make what a variant of Megatron's own communicates with, before its first turn.

        A collective call over the world for these. A rank that could not would end the run in a training step.
        """
        if variant in self._starting or not is_stock_variant(variant):
            return True
        # Where one rank lacks its package, the others would wait for that rank in what all of them make together.
        failure = self._first_failure(missing_package(variant) if layers else None)
        if failure is None:
            failure = self._first_failure(failure_to_start(variant, [one.layer for one in layers]))
        if failure is not None:
            release_buffers(variant)
            say(AUTO, no_start_line(variant, *failure))
            return False
        self._starting.add(variant)
        return True

    def _first_failure(self, own: str | None) -> tuple[int, str] | None:
        """Returns the first rank on which something has failed, and how; None: on none. A collective call over the
        world.

        Args:
            own: how it has failed on this rank; None: it has not.
        """
        return next(((rank, failure) for rank, failure in enumerate(known_to_all(own)) if failure is not None), None)

    def _watch(self) -> None:
        """Looks and plans anew where a choice does not rest on what it was made by any more. Nothing waits for the
        device, but once a window: the optimizer's step does, for the norm of the gradients.
        """
        median = None if self._drift is None else self._drift.record(self.clock.take())
        if median is None:
            return
        reason = self._drift.why_over(self._largest(median))
        if reason is None:
            return
        ran = self.trying.ran
        had_been = f"{' and '.join(self.chosen.values())} had been chosen; {reason}"
        if not self._could_run_again():
            say(AUTO, f"{had_been}: it stays, as {ran}, by which it is planned anew, may have no room any more")
            self._drift = Drift(self.overhead, self._drift.next_look)
            return
        self.settled, self.trials = False, None
        say(AUTO, f"{had_been}: {ran} runs once, to plan anew")
        self._run_only(ran, self.layers)
        memory_room.count_peak_anew()
        self._look = Look(self.config, self.options)
        self._look.at(self.layers)

    def _could_run_again(self) -> bool:
        """Whether all GPUs have room for what runs in a step that is looked at, which may hold more than what was
        chosen. A collective call over the world.
        """
        later = later_micro_batches()
        room = memory_room.room(sum(passes_held(layer, self.config, later) for layer in self.layers), len(self.layers))
        above = self._held(lambda one, _: one.above(one.ran, self.chosen[one.shape]))
        return all(known_to_all(room is None or above <= room.spare))

    def _settle(self) -> None:
        trials, chosen = self.trials, self.trials.choice or self.trying.ran
        self.measured = trials.medians()
        self.overhead += trials.longer_than(self.measured.get(chosen, 0.0))
        self.chosen[self.trying.shape] = chosen
        self._run_only(chosen, self._layers_of(self.trying))
        for line in settled_lines(self, chosen):
            say(AUTO, line)
        following = self.shapes.index(self.trying) + 1
        if following < len(self.shapes):
            self._begin_trials(following)
            self._go_on()
        else:
            self._rest()

    def _rest(self) -> None:
        """Ends the trials; nothing is tried any more until steps take another time."""
        self.settled = True
        self.clock.forget()
        trained = getattr(training_arguments(), "iteration", 0)  # of a checkpoint that the run goes on from
        look = first_look(trained) if self._drift is None else self._drift.next_look
        self._drift = Drift(self.overhead, look)
        memory_room.give_back()
        memory_room.count_peak_anew()

    def _largest(self, value: float) -> float:
        """Returns the largest value of all ranks."""
        # host synchronisation: in trials, and once a window of Drift
        return largest_of_ranks(float(value), (dist.group.WORLD,), device_of(dist.group.WORLD))

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # host synchronisation: in trials alone, around a step that is timed
