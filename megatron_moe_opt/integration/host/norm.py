"""Normalisation without Transformer Engine or Apex."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_moe_opt.integration.patching import replace


def _torch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts `WrappedTorchNorm`, the only norm left, which refuses sequence parallelism and persist_layer_norm.

    The latter names a kernel and means nothing here. With sequence parallelism each TP rank normalises its own
    tokens, which a torch norm does as well; what is missing is the mark on the parameters by which Megatron sums
    their gradients over TP.
    """

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        plain.persist_layer_norm = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return new


def use_torch_norm() -> None:
    """Let WrappedTorchNorm serve every configuration that Transformer Engine's norm would."""
    module = importlib.import_module("megatron.core.transformer.torch_norm")
    replace(module.WrappedTorchNorm, "__new__", _torch_norm)
