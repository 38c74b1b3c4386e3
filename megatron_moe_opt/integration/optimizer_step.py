"""The end of an optimizer step, when weights are new."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_callbacks: dict[bool, list[Callable[[], None]]] = {True: [], False: []}


def after_optimizer_step(callback: Callable[[], None], updated: bool = True) -> None:
    """Has `callback` called after every step of a Megatron optimizer that updated weights, on all ranks alike.

    Args:
        updated: False: after those that did not, because gradients overflowed.
    """
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer

    if callback not in _callbacks[updated]:
        _callbacks[updated].append(callback)
    for optimizer in (ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer):
        if not hasattr(optimizer.step, "_moe_opt"):
            optimizer.step = _wrap(optimizer.step)


def _wrap(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        for callback in _callbacks[bool(result[0])]:  # (updated, gradient norm, zeros)
            callback()
        return result

    stepping._moe_opt = True
    return stepping
