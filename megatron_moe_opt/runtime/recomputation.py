"""Whether a forward pass repeats an earlier one."""

from __future__ import annotations

import torch


def is_recomputing() -> bool:
    """Whether this thread is in a backward pass, in which forward passes repeat what was not kept for it."""
    return torch._C._current_graph_task_id() >= 0
