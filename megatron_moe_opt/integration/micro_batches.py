"""Megatron's pipeline schedules, which run the micro-batches of a step."""

from __future__ import annotations

import functools
from typing import Any

from megatron_moe_opt.integration.seams import seam_moved
from megatron_moe_opt.runtime.travelling_experts.step_passes import step_of

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)


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
        if forward_only:
            return run()
        with step_of(num_microbatches):
            return run()

    schedule._moe_opt = True
    return schedule
