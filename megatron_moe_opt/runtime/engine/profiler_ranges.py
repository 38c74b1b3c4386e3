"""Names under which a profiler shows what runs: passes of layers, and ops of schedules with their chunks.

They appear in torch.profiler, and in nsys where PyTorch emits NVTX ranges (`torch.autograd.profiler.emit_nvtx`, or
Megatron-LM's `--profile`). Where nobody profiles, they cost one question.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.schedules.schedule import Schedule

_C = load_extension()


def is_profiling() -> bool:
    """Whether a profiler of PyTorch is on in this thread."""
    return torch.autograd._profiler_enabled()


def shown_as(name: Callable[[], str]) -> AbstractContextManager[Any]:
    """Returns a context that a profiler shows under a name, which is asked for only where there is one."""
    return record_function(name()) if is_profiling() else nullcontext()


def shown_ops(schedule: Schedule, actions: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Returns the actions of each op as ones that a profiler shows under the op's schedule, kind and chunk."""
    return [
        tuple(_C.named(f"{schedule.name}: {op}", action) for action in of_op)
        for op, of_op in zip(schedule.ops, actions, strict=True)
    ]
