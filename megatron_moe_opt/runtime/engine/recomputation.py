"""Whether a forward pass repeats an earlier one, and whether others than autograd save tensors for backward."""

from __future__ import annotations

import torch


def is_recomputing() -> bool:
    """Whether this thread is in a backward pass, in which forward passes repeat what was not kept for it."""
    return torch._C._current_graph_task_id() >= 0


def saved_tensors_are_hooked() -> bool:
    """Whether what operations save for their backward pass goes through somebody's hooks.

    torch.utils.checkpoint without re-entry drops it there, and runs the forward pass again when it is asked for;
    save_on_cpu and Megatron's fine-grained offloading move it to the host. To ask saves a tensor: a pass that repeats
    another one must ask as often.
    """
    if not torch.is_grad_enabled():
        return False
    probe = torch.empty(1, requires_grad=True).square()  # what it saves points into it: it must stay until the end
    try:  # before PyTorch 2.8 there is no other way to learn of hooks
        probe.grad_fn._raw_saved_self.register_hooks(lambda saved: saved, lambda saved: saved)
    except RuntimeError:
        return True
    return False
