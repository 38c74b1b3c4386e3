"""Expert-parallel traffic first (MoNTA, "Communication Conflict": EP before PP, CP and DP).

NCCL runs the collectives of a process group on a stream of the group. Megatron-Core gives that stream a high priority
where `high_priority_stream_groups` of `parallel_state.initialize_model_parallel` names the group; NCCL knows no more
than two levels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_moe_opt.integration.patching import wrap_once

EXPERT_GROUPS = ("ep", "ep_tp", "tp_ep_mp")
"""What Megatron calls the groups of a MoE layer: all-to-all, all-gather and reduce-scatter, and row counts."""

_ARGUMENT = "high_priority_stream_groups"


def prioritize_expert_groups() -> None:
    """Adds the expert groups to the high-priority groups that the user names (--high-priority-stream-groups).

    Wraps `initialize_model_parallel` once. Nothing changes where NCCL is not the backend, or where Megatron has no such
    argument.
    """
    from megatron.core import parallel_state

    if _ARGUMENT in inspect.signature(parallel_state.initialize_model_parallel).parameters:
        wrap_once(parallel_state, "initialize_model_parallel", _prioritizing)


def _prioritizing(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if not _uses_nccl():
        return stock(*args, **kwargs)
    call = inspect.signature(stock).bind(*args, **kwargs)
    named = call.arguments.get(_ARGUMENT) or ()
    call.arguments[_ARGUMENT] = list(dict.fromkeys((*named, *EXPERT_GROUPS)))
    return stock(*call.args, **call.kwargs)


def _uses_nccl() -> bool:
    return dist.is_nccl_available() and dist.group.WORLD is not None and "nccl" in dist.get_backend_config()
