"""The distributed optimizer over torch's Adam, without Transformer Engine's or Apex's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_moe_opt.integration.patching import replace


def _own_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives each parameter a step of its own: loading a checkpoint copies each of Adam's states, but has dropped torch
    Adam's per-parameter `step`.

    The step has come with the parameter groups before, as one tensor that all parameters share and each would count
    up in turn: every parameter gets its own. Main parameters of an fp32 model are views of the model's, which may
    only be overwritten outside autograd; not every loader sees to that.
    """

    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        with torch.no_grad():
            original(self, model_param, tensors)

    return set_states


def _begin_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes Adam's states before a checkpoint is loaded into, or saved from, an optimizer that has not stepped yet.

    The state_dict asks every parameter's Adam state for its step, and torch's Adam makes states in its first step:
    make them here as that step would, at zero.
    """

    def state_dict(self: Any) -> dict[str, Any]:
        if isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    state = self.optimizer.state[parameter]
                    if not state:
                        state["step"] = torch.zeros((), dtype=torch.float32)
                        state["exp_avg"] = torch.zeros_like(parameter)
                        state["exp_avg_sq"] = torch.zeros_like(parameter)
        return original(self)

    return state_dict


def use_torch_adam() -> None:
    """Let checkpoints of the distributed optimizer be loaded into torch's Adam."""
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    replace(module.DistributedOptimizer, "state_dict", _begin_states)
    replace(module.DistributedOptimizer, "_set_main_param_and_optimizer_states", _own_step)
