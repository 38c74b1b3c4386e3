"""The distributed optimizer over torch's Adam, without Transformer Engine's or Apex's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .patching import replace


def _keep_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Loading a checkpoint copies each of Adam's states, but has dropped torch Adam's per-parameter `step`.

    The step is restored with the parameter groups before: it stays as it is.
    """

    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    return set_states


def use_torch_adam() -> None:
    """Let checkpoints of the distributed optimizer be loaded into torch's Adam."""
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    replace(module.DistributedOptimizer, "_set_main_param_and_optimizer_states", _keep_step)
