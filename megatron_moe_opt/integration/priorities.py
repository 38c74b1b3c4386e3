"""Expert-parallel traffic first (MoNTA, "Communication Conflict": EP before PP, CP and DP).

NCCL runs the collectives of a process group on a stream of the group. Megatron-Core gives that stream a high priority
where `high_priority_stream_groups` of `parallel_state.initialize_model_parallel` names the group; NCCL knows no more
than two levels.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed as dist

EXPERT_GROUPS = ("ep", "ep_tp", "tp_ep_mp")
"""What Megatron calls the groups of a MoE layer: all-to-all, all-gather and reduce-scatter, and row counts."""

_ARGUMENT = "high_priority_stream_groups"


def prioritize_expert_groups() -> None:
    """Adds the expert groups to the high-priority groups that the user names (--high-priority-stream-groups).

    Wraps `initialize_model_parallel` once. Nothing changes where NCCL is not the backend, or where Megatron has no such
    argument.
    """
    from megatron.core import parallel_state

    stock = parallel_state.initialize_model_parallel
    signature = inspect.signature(stock)
    if hasattr(stock, "_moe_opt") or _ARGUMENT not in signature.parameters:
        return

    @functools.wraps(stock)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        if not _uses_nccl():
            return stock(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        named = call.arguments.get(_ARGUMENT) or ()
        call.arguments[_ARGUMENT] = list(dict.fromkeys((*named, *EXPERT_GROUPS)))
        return stock(*call.args, **call.kwargs)

    initialize_model_parallel._moe_opt = True
    parallel_state.initialize_model_parallel = initialize_model_parallel


def _uses_nccl() -> bool:
    return dist.is_nccl_available() and dist.group.WORLD is not None and "nccl" in dist.get_backend_config()
