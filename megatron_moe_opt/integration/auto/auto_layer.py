"""MoE layers under `auto`, as they are built: all of a model have one controller, which is told of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_moe_opt.integration.auto.controller import Controller
from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer, Plug
from megatron_moe_opt.integration.micro_batches import follow_micro_batches
from megatron_moe_opt.integration.optimizer_step import (
    after_optimizer_step,
    before_optimizer_step,
    configs_of_step,
    model_of_step,
    refuse_lone_skips,
)
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.options import Options
from megatron_moe_opt.topology.expert_groups import ExpertGroups

_controller: Controller | None = None


def new_controller() -> None:
    """Has layers that are built from now on planned by themselves."""
    global _controller
    _controller = None


@contextmanager
def controller_aside() -> Iterator[None]:
    """Keeps layers that are built inside the block apart from the present controller."""
    global _controller
    outside, _controller = _controller, None
    try:
        yield
    finally:
        _controller = outside


def controller_of(config: Any, options: Options) -> Controller:
    """Returns the controller of the layers that are being built, which every rank has that builds one with `auto`.

    Where all process groups have been destroyed since, as between two trainings in one process, it is another one.
    """
    global _controller
    if _controller is None or _controller.is_over():
        _controller = Controller(config, options)
        follow_micro_batches()  # before the training loop asks for its schedule, once
        before_optimizer_step(_before_step)  # before what travels is sent, which is asked for later
        after_optimizer_step(_after_step)
        after_optimizer_step(_after_skipped_step, updated=False)
    return _controller


def current_controller() -> Controller | None:
    """Returns the controller of the layers that were built last; None where none of them is planned."""
    return _controller


def plan_layer(layer: Any, groups: ExpertGroups, options: Options, plug: Plug) -> None:
    """Has a MoE layer that Megatron has just built, with its stock dispatcher, planned."""
    controller_of(layer.config, options).add(PlannedLayer(layer, groups, options, plug))


def _before_step() -> None:
    if _controller is not None:
        _controller.clock.gradients_cleared()


def _after_step() -> None:
    _step_ended(Controller.after_step)


def _after_skipped_step() -> None:
    _step_ended(Controller.after_skipped_step)


def _step_ended(of_planned_model: Callable[[Controller], None]) -> None:
    if _controller is None:
        return
    refuse_lone_skips(
        "--moe-token-dispatcher-type auto counts the optimizer's steps with all ranks", "name a dispatcher"
    )
    _controller.note_world()  # on ranks without a layer too, whose configuration may have come before the groups
    if not _has_planned_layers():
        _controller.clock.others_step_ended()
    elif _is_of_first_model(_controller):
        of_planned_model(_controller)
    else:
        _controller.clock.forget()


def _has_planned_layers() -> bool:
    """Whether the step that has ended is of a model with planned layers, on whatever rank: all ranks know."""
    configs = configs_of_step()
    planned = (one.num_moe_experts is not None and one.moe_token_dispatcher_type == AUTO for one in configs)
    return not configs or any(planned)


def _is_of_first_model(controller: Controller) -> bool:
    """Whether the step is of the model whose step ended first. Layers of other models, a critic's beside an actor's
    say, run what is chosen by its steps. Optimizers that do not know their model are taken to be the first one's.
    """
    model = model_of_step()
    if model is not None and controller.model is None:
        controller.model = model.number
    return model is None or model.number == controller.model
