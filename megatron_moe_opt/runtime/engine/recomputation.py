"""Whether a forward pass repeats an earlier one, and whether others than autograd save tensors for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What is called with a tensor that is saved for backward, and what gives it back."""


def is_recomputing() -> bool:
    """Whether this thread is in a backward pass, in which forward passes repeat what was not kept for it."""
    return torch._C._current_graph_task_id() >= 0


def saved_tensors_are_hooked() -> bool:
    """Whether what operations save for their backward pass goes through somebody's hooks.

    torch.utils.checkpoint without re-entry drops it there, and runs the forward pass again when it is asked for;
    save_on_cpu and Megatron's offloading move it to the host. Before PyTorch 2.8 to ask saves a tensor: a pass that
    repeats another one must ask as often.
    """
    if not torch.is_grad_enabled():
        return False
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        return top(True) is not None
    probe = torch.empty(1, requires_grad=True).square()  # what it saves points into it: it must stay until the end
    try:
        probe.grad_fn._raw_saved_self.register_hooks(lambda saved: saved, lambda saved: saved)
    except RuntimeError:
        return True
    return False


def outer_hooks() -> Hooks | None:
    """Returns the hooks through which operations save here, so that further ones inside can hand on to them: PyTorch
    calls the innermost alone. None: there are none, or PyTorch (before 2.8) does not say.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None or not torch.is_grad_enabled() else top(True)
