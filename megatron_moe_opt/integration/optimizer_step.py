"""The begin and the end of an optimizer step."""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.patching import wrap_once
from megatron_moe_opt.runtime.travelling_experts.step_passes import TrainedModel

_at_begin: list[Callable[[], None]] = []
_at_end: dict[bool, list[Callable[[], None]]] = {True: [], False: []}
"""Functions to call at the end of a step, by whether weights were updated."""
_present: Any = None
"""The optimizer whose step has ended, or that has cleared gradients, while functions are called for that."""
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The number of the model that each chunk of a model is of."""
_modules: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""All modules of each chunk."""
_next_number = itertools.count()
_under_way: set[str] = set()
"""The methods of optimizers that are being called."""


def before_optimizer_step(callback: Callable[[], None]) -> None:
    """Has `callback` called when a step begins, which is when gradients are cleared, on all ranks alike."""
    _add(_at_begin, callback)


def after_optimizer_step(callback: Callable[[], None], updated: bool = True) -> None:
    """Has `callback` called after every step of a Megatron optimizer that updated weights, on all ranks alike.

    Args:
        updated: False: after those that did not, because gradients overflowed.
    """
    _add(_at_end[updated], callback)


def forget(callback: Callable[[], None]) -> None:
    """Has it called no more, whenever it was."""
    for callbacks in (_at_begin, *_at_end.values()):
        if callback in callbacks:
            callbacks.remove(callback)


def gradients_cleared(optimizer: Any = None) -> None:
    """Calls what is to be called when a step of an optimizer begins, where it is known of which."""
    _call(_at_begin, optimizer)


def step_ended(updated: bool, optimizer: Any = None) -> None:
    """Calls what is to be called after a step of an optimizer, where it is known of which.

    Raises a `ConfigurationError` in a capture of the step: none would be called when that is replayed.
    """
    if _at_end[updated] and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            "--optimizer-cuda-graph replays steps of the optimizer without a word to what follows them, as `auto`, "
            "experts that travel and recordings of routing do: drop it"
        )
    _call(_at_end[updated], optimizer)


def configs_of_step() -> list[Any]:
    """Returns the configurations of the model whose step begins or has ended, while callbacks run; none: not known.

    A process may train several, of which not all have MoE layers.
    """
    return [chunk.config for chunk in _chunks_of_step()]


def model_of_step() -> TrainedModel | None:
    """Returns the model whose step begins or has just ended, while callbacks run; None: not known."""
    chunks = _chunks_of_step()
    if not chunks:
        return None
    # Another optimizer may be of some of these chunks: the largest has the last word.
    known = [_numbers[chunk] for chunk in chunks if chunk in _numbers]
    number = min(known) if known else next(_next_number)
    for chunk in chunks:
        _numbers[chunk] = number
        if chunk not in _modules:
            _modules[chunk] = weakref.WeakSet(chunk.modules())
    return TrainedModel(number, lambda module: any(module in _modules[chunk] for chunk in chunks))


def _chunks_of_step() -> list[Any]:
    return list(getattr(_present, "model_chunks", None) or ())


def refuse_lone_skips(what: str, instead: str) -> None:
    """Raises ConfigurationError where the optimizer whose step has ended skips steps by the norm of gradients, which
    each rank may decide otherwise (megatron-core 0.19: one without trained parameters has none).

    Args:
        what: what all ranks do together after a step.
        instead: the way out besides that of a threshold at infinity.
    """
    if math.isfinite(getattr(getattr(_present, "config", None), "grad_norm_skip_threshold", math.inf)):
        raise ConfigurationError(
            f"{what}, and with a grad_norm_skip_threshold each rank skips by itself: leave it at infinity, or {instead}"
        )


def _call(callbacks: list[Callable[[], None]], optimizer: Any) -> None:
    global _present
    _present = optimizer
    try:
        for callback in tuple(callbacks):
            if callback in callbacks:  # one before it may have had it forgotten
                callback()
    finally:
        _present = None


def _add(callbacks: list[Callable[[], None]], callback: Callable[[], None]) -> None:
    from megatron.core import optimizer as optimizers
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import (
        ChainedOptimizer,
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
        MixedPrecisionOptimizer,
    )

    if callback not in callbacks:
        callbacks.append(callback)
    stepping = [ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer]
    if "megatron.core.models.mimo" in sys.modules:  # a model in several parts, whose optimizers' own step is not called
        with suppress(ImportError):  # from 0.19 on
            from megatron.core.models.mimo.optimizer import MimoOptimizer

            stepping.append(MimoOptimizer)
    for optimizer in stepping:
        _follow(optimizer, "step", lambda one, result: step_ended(bool(result[0]), one))  # (updated, norm, zeros)
    clearing = [ChainedOptimizer, FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer]
    if hasattr(optimizers, "FullyShardedOptimizer"):  # from 0.20 on
        clearing.append(optimizers.FullyShardedOptimizer)
    for optimizer in clearing:
        _follow(optimizer, "zero_grad", lambda one, _: gradients_cleared(one))


def _follow(optimizer: type, name: str, then: Callable[[Any, Any], None]) -> None:
    """Has `then` called after each call of a method, with the optimizer and the result. Optimizers consist of others,
    which do not know of what model they are a part: not after the calls that one makes of its parts'.
    """

    def followed(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if name in _under_way:
            return stock(self, *args, **kwargs)
        _under_way.add(name)
        try:
            result = stock(self, *args, **kwargs)
        finally:
            _under_way.remove(name)
        then(self, result)
        return result

    wrap_once(optimizer, name, followed)
