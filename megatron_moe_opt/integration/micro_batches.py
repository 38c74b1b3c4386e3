"""Megatron's pipeline schedules, which run the micro-batches of a step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_moe_opt.integration.seams import seam_moved
from megatron_moe_opt.runtime.travelling_experts.step_passes import step_of

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)

_is_forward_only = False
"""Whether the schedule under way has no backward passes: an evaluation, or rollouts of reinforcement learning."""


def trains(module: torch.nn.Module) -> bool:
    """Whether a pass of a module that begins now is one of training. Rollouts are none, though in training mode."""
    return module.training and not _is_forward_only


def follow_micro_batches() -> None:
    """Has every step that one of Megatron's schedules runs say of how many micro-batches it is.

    A schedule that somebody asked for before keeps it to itself, and so its passes are steps of their own.
    """
    from megatron.core.pipeline_parallel import schedules

    for name in _SCHEDULES:
        stock = getattr(schedules, name, None)
        if stock is None:
            raise seam_moved(f"megatron.core.pipeline_parallel.schedules has no {name}")
        if not hasattr(stock, "_moe_opt"):
            setattr(schedules, name, _followed(stock))


def _followed(stock: Any) -> Any:
    @functools.wraps(stock)
    def schedule(*args: Any, num_microbatches: int, forward_only: bool = False, **kwargs: Any) -> Any:
        run = functools.partial(stock, *args, num_microbatches=num_microbatches, forward_only=forward_only, **kwargs)
        with _forward_only() if forward_only else step_of(num_microbatches):
            return run()

    schedule._moe_opt = True
    return schedule


@contextmanager
def _forward_only() -> Iterator[None]:
    """Runs a schedule of forward passes inside the context."""
    global _is_forward_only
    _is_forward_only = True
    try:
        yield
    finally:
        _is_forward_only = False
