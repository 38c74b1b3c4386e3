"""Megatron's pipeline schedules, which run the micro-batches of a step."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_moe_opt.integration.patching import seam_moved, wrap_once
from megatron_moe_opt.runtime.travelling_experts.step_passes import step_of

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)

_after_passes: list[weakref.WeakMethod[Callable[[], None]]] = []
_is_forward_only = False
"""Whether the schedule under way has no backward passes: an evaluation, or rollouts of reinforcement learning."""


def trains(module: torch.nn.Module) -> bool:
    """Whether a pass of a module that begins now is one of training. Rollouts are none, though in training mode, nor
    are those that CUDA graphs are captured in, between steps.
    """
    from megatron.core.transformer.cuda_graphs import is_graph_capturing

    return module.training and not _is_forward_only and not is_graph_capturing()


def after_passes(callback: Callable[[], None]) -> None:
    """Has a bound method called when the passes of a training step have ended, before the optimizer's step, as long as
    its object is there.
    """
    _after_passes.append(weakref.WeakMethod(callback))


def not_after_passes(callback: Callable[[], None]) -> None:
    """Has it called no more, if it was."""
    _after_passes[:] = [one for one in _after_passes if one() not in (None, callback)]


def later_micro_batches() -> int:
    """Returns how many micro-batches a step has when batches have been ramped up; 0 where they are already, or never
    are, or a training loop has no such calculator of Megatron's.
    """
    from megatron.core import num_microbatches_calculator

    calculator = getattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    if calculator is None:
        return 0
    later = copy.copy(calculator)  # which class ramps up depends on Megatron's version
    later.update(sys.maxsize, consistency_check=False)
    return later.get() if later.get() != calculator.get() else 0


def follow_micro_batches() -> None:
    """Has every step that one of Megatron's schedules runs say of how many micro-batches it is.

    A schedule that somebody asked for before keeps it to itself, and so its passes are steps of their own.
    """
    from megatron.core.pipeline_parallel import schedules

    for name in _SCHEDULES:
        if not hasattr(schedules, name):
            raise seam_moved(f"megatron.core.pipeline_parallel.schedules has no {name}")
        wrap_once(schedules, name, _followed)


def _followed(
    stock: Callable[..., Any], *args: Any, num_microbatches: int, forward_only: bool = False, **kwargs: Any
) -> Any:
    with _forward_only() if forward_only else step_of(num_microbatches):
        returned = stock(*args, num_microbatches=num_microbatches, forward_only=forward_only, **kwargs)
    for one in () if forward_only else tuple(_after_passes):
        if (callback := one()) is not None:
            callback()
    return returned


@contextmanager
def _forward_only() -> Iterator[None]:
    """Runs a schedule of forward passes inside the context."""
    global _is_forward_only
    _is_forward_only = True
    try:
        yield
    finally:
        _is_forward_only = False
