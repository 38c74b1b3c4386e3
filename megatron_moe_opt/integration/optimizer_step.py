"""The end of an optimizer step, when weights are new."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_callbacks: list[Callable[[], None]] = []


def after_optimizer_step(callback: Callable[[], None]) -> None:
    """Has `callback` called after every step of a Megatron optimizer that updated weights, on all ranks alike."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer

    if callback not in _callbacks:
        _callbacks.append(callback)
    for optimizer in (ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer):
        if not hasattr(optimizer.step, "_moe_opt"):
            optimizer.step = _wrap(optimizer.step)


def _wrap(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        if result[0]:  # (updated, gradient norm, zeros); not updated where gradients overflowed, on any rank
            for callback in _callbacks:
                callback()
        return result

    stepping._moe_opt = True
    return stepping
