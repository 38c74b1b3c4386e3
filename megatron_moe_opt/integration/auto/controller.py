"""What `auto` does between steps: the layers' dispatchers are planned, tried and then kept.

    step 1           stock runs, and the layers see how many rows they have and how unevenly (with a plan.json the plan:
                     given_plan.py)
    after step 1     all ranks tell each other what they saw (look.py, first_step.py)
                     without a profile all ranks measure what moves cost, or rank 0 reads what a run like this one has
                     measured (move_costs.py, own_profile.py)
                     rank 0 ranks all candidates by the profile (planning/planner.py) and tells the others
    steps 2 to n     the plan, stock and the runners-up take turns, ever fewer of them (turns.py,
                     planning/choosing/trials.py)
    from then on     the fastest runs, by the slowest rank's times, on all ranks; when steps have come to take another
                     time, and after 1,000 of them, 10,000 and so on (planning/choosing/drift.py), a step runs as the
                     first one did, and what it shows is planned by and tried

Beside them Megatron's own allgather and, where installed, flex are tried, which nobody predicts (stock_variants.py).
What a GPU has no room for is not tried (memory_room.py), nor what an earlier start has ended in (first_turns.py).

All candidates compute the same function, so that training does not notice. Dispatchers are exchanged between optimizer
steps only (layers_in_turn.py): no pass of theirs is under way then, and recomputed passes find what their first run
used. None that loses information is a candidate, but with --moe-opt-allow-lossy those whose rows are rounded on the
wire.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe_opt.dispatchers.say import say, say_once
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto import memory_room
from megatron_moe_opt.integration.auto.auto_report import (
    changed_line,
    later_layers_line,
    no_layer_line,
    plan_lines,
    settled_lines,
)
from megatron_moe_opt.integration.auto.first_step import (
    Alike,
    FirstStep,
    of_all,
    runs_first,
    tried_by_plan,
    tried_by_profile,
)
from megatron_moe_opt.integration.auto.first_turns import FirstTurns
from megatron_moe_opt.integration.auto.given_plan import GivenPlan
from megatron_moe_opt.integration.auto.layers_in_turn import LayersInTurn
from megatron_moe_opt.integration.auto.look import Look
from megatron_moe_opt.integration.auto.move_costs import MoveCosts
from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer
from megatron_moe_opt.integration.auto.step_clock import StepClock
from megatron_moe_opt.integration.auto.turns import Turns
from megatron_moe_opt.integration.layer.overlapped_batches import before_pass
from megatron_moe_opt.integration.micro_batches import after_passes, trains
from megatron_moe_opt.integration.training_arguments import training_arguments
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.choosing.drift import Drift, first_look
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.runtime.engine.collectives import device_of
from megatron_moe_opt.topology.agreement import found_by_first, known_to_all, largest_of_ranks
from megatron_moe_opt.topology.process_groups import is_destroyed


class Controller:
    """All planned layers of a process. Every rank of the world has one, and calls it alike."""

    def __init__(self, config: Any, options: Options) -> None:
        self.config, self.options = config, options
        self.layers = LayersInTurn(config)
        self.given = None if options.plan is None else GivenPlan(options.plan, config)
        """The plan of --moe-opt-plan; None: there is none."""
        self.costs = MoveCosts(config, options)
        """What moves cost, by which is planned without one."""
        self.model: int | None = None
        """The number of the model whose steps are looked at and timed; None: none has ended, or it is not known."""
        self._look = Look(config, options)
        """Looks at the step that the plan is made by."""
        self.first_step: FirstStep | None = None
        """What all ranks saw in the step that was looked at, the first or a later one that ran like it; None: not yet.
        """
        self._first_turns: FirstTurns | None = None
        """What runs its first steps, on rank 0, where it is written down; None: elsewhere, and before trials."""
        self.shapes: tuple[Alike, ...] = ()
        """The shapes that the layers have, the one that takes longest first; they are tried one after the other."""
        self.turns: Turns | None = None
        """The trials in the layers of one of `shapes`, under way or the last; None: they have not begun, or there are
        none.
        """
        self.overhead = 0.0
        """Seconds that trials took longer than as many steps of what stays."""
        self.chosen: dict[LayerWorkload | None, str] = {}
        """What the last trials have chosen, by the shape of the layers. Ranks without layers know it too."""
        self.settled = False
        self._drift: Drift | None = None
        """Watches the steps after the last trials; None: there were none."""
        self._world: dist.ProcessGroup | None = dist.group.WORLD
        """All ranks, between which layers were built or trained; None: not yet."""
        stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
        self.clock = StepClock(self._now, stages, chunks)
        after_passes(self._passes_end)

    def note_world(self) -> None:
        """Learns between which ranks this is, once there are process groups."""
        if self._world is None:
            self._world = dist.group.WORLD

    def is_over(self) -> bool:
        """Whether all process groups have been destroyed since, as between two trainings in one process."""
        return self._world is not None and is_destroyed(self._world)

    def add(self, layer: PlannedLayer) -> None:
        """Takes a layer that has just been built; by a plan.json, it runs as planned from the start."""
        self.note_world()
        if self.first_step is not None:
            say_once(AUTO, "later layers", later_layers_line)
        self.layers.append(layer)
        if self.options.network_levels is not None:
            layer.workers()  # refuses now what the ranks do not lie in
        self._look.at([layer])
        before_pass(layer.layer, lambda module, _: self.clock.layer_begins(trains(module)))
        if self.given is not None:
            self.given.run_in(layer)
            return
        self.costs.check(layer)
        if (first := runs_first(layer.layer.config)) != layer.current:
            layer.use(first)
        self.layers.note_stock()

    def after_step(self) -> None:
        """Goes on with looking, planning and trying; called when an optimizer step has ended. A collective call over
        the world until the choice is made, and then every so many steps.
        """
        if self.settled:
            self._watch()
            return
        self._synchronize()
        if self.turns is None:
            self._begin()
        elif seconds := self._largest(self.clock.take()):  # 0: no layer has run on any rank: another model's step
            self.turns.trials.record(seconds)
            self._go_on()

    def after_skipped_step(self) -> None:
        """Leaves out a step that the optimizer has skipped: its passes and its time are no other step's."""
        self.clock.forget()
        if not self.settled and self.turns is None:
            self._look.again()

    def _passes_end(self) -> None:
        if not self.settled:  # the host would have to wait for the device
            self.clock.passes_end()

    def _now(self) -> float:
        if not self.settled:
            self._synchronize()
        return time.perf_counter()

    def _begin(self) -> None:
        """Plans the trials by the step that has just run, says what is tried, and begins; where no layer has run in it
        on any rank, it was another model's, and the next one is looked at.
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
        if self.given is None:
            self.costs.measure(self.first_step.workloads)
        try:
            self.shapes = found_by_first(lambda: self._make_plan(self.first_step), dist.group.WORLD)
        except ConfigurationError as error:
            if before is None:
                raise
            say(AUTO, f"nothing was planned anew ({error}); what was chosen before runs on")
            self.first_step = before
            for one in self.shapes:
                self.layers.run(self.chosen[one.shape], self.layers.of(one))
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
        self._go_on()

    def _make_plan(self, first: FirstStep) -> tuple[Alike, ...]:
        """Returns what is tried in the layers of each shape, the shape that takes most time first. On rank 0."""
        if self._first_turns is None:
            self._first_turns = FirstTurns()
        left_out = self._first_turns.ended
        if self.given is not None:
            found = (tried_by_plan(self.given.plan, self.config, first, left_out),)
        else:
            found = tried_by_profile(self.costs.cluster, self.config, self.options, first, left_out)
        return tuple(one.keeping(self.chosen.get(one.shape)) for one in found)

    def _begin_trials(self, number: int) -> None:
        """Tries what is planned for the layers of a shape, and was chosen before; the others run what they do."""
        self.turns = Turns(self.layers, self.shapes, number, self.first_step.rooms, self._first_turns)

    def _go_on(self) -> None:
        """Has the next step run what has the next turn; or, where the trials are over, what stays."""
        if not self.turns.go_on():
            self._settle()

    def _settle(self) -> None:
        """Has what has won run in the layers that were tried, and begins to try those of the next shape."""
        one, trials = self.turns.alike, self.turns.trials
        chosen = trials.choice or one.ran
        self.overhead += trials.longer_than(trials.medians().get(chosen, 0.0))
        self.chosen[one.shape] = chosen
        self.layers.run(chosen, self.layers.of(one))
        for line in settled_lines(self, chosen):
            say(AUTO, line)
        following = self.shapes.index(one) + 1
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
        ran = self.shapes[0].ran
        had_been = f"{' and '.join(self.chosen.values())} had been chosen; {reason}"
        if not self.layers.can_be_looked_at(self.shapes, self.chosen):
            say(AUTO, f"{had_been}: it stays, as {ran}, by which it is planned anew, may have no room any more")
            self._drift = Drift(self.overhead, self._drift.next_look)
            return
        self.settled, self.turns = False, None
        say(AUTO, f"{had_been}: {ran} runs once, to plan anew")
        self.layers.run(ran, self.layers)
        memory_room.count_peak_anew()
        self._look = Look(self.config, self.options)
        self._look.at(self.layers)

    def _largest(self, value: float) -> float:
        """Returns the largest value of all ranks."""
        # host synchronisation: in trials, and once a window of Drift
        return largest_of_ranks(float(value), (dist.group.WORLD,), device_of(dist.group.WORLD))

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # host synchronisation: in trials alone, around a step that is timed
