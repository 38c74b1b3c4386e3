"""Environment variables that decide how streams and NCCL share a GPU: times hold for those they were measured with.

CUDA_DEVICE_MAX_CONNECTIONS is the number of hardware queues through which streams reach a GPU, 8 where it is not set.
With 1, what waits on one stream holds up all that is launched after it on others (docs/streams.md).
TORCH_NCCL_BLOCKING_WAIT has the host wait where a stream would. TORCH_DIST_USE_NCCL2 chooses between the two classes
that PyTorch has for NCCL from 2.15 on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_moe_opt.planning.costs.differences import differences

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
NEW_CLASS = "TORCH_DIST_USE_NCCL2"
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
SHARED = "MOE_OPT_SHARED_GPUS"
"""Environment variable of ours: 1, where ranks of a node are to share its GPUs, which serves tests."""
A_GPU = Path("/dev/nvidia0")
"""A device that a node with NVIDIA's GPUs has, whether PyTorch can use them or not."""
_YES = ("1", "t", "true", "y", "yes")
"""What PyTorch reads as on, in any case."""
_NO_GPU = ("", "-1", "NoDevFiles")
"""What CUDA_VISIBLE_DEVICES is where no GPU is to be used; the last one is SLURM's."""
_BY_DEFAULT = 8
_OF_NO_EFFECT = ("NCCL_DEBUG", "NCCL_HOSTID")
"""The beginnings of names that say what NCCL writes, not what it does; and a name that is each rank's own."""
_FIRST_THAT_NEEDS_NO_ORDER = 10
"""The first compute capability, Blackwell's, of GPUs on which Megatron does not ask for one queue."""


def gpu_settings() -> dict[str, str]:
    """Returns CONNECTIONS, BLOCKING, NEW_CLASS, SHARED and NCCL's variables, as far as they are set."""
    return {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name in (CONNECTIONS, BLOCKING, NEW_CLASS, SHARED)
        or (name.startswith("NCCL_") and not name.startswith(_OF_NO_EFFECT))
    }


def other_settings(file: object, measured: Mapping[str, object] | None) -> str | None:
    """Returns one sentence where this process has other settings than `file` was measured with; None where it has the
    same.

    Args:
        measured: what `gpu_settings` was there; None: not known.
    """
    if measured is None:
        return None
    listed = differences(gpu_settings(), measured)
    if listed is None:
        return None
    return f"{file} was measured with other settings, and its times may not hold: {listed}; set these, or measure again"


def demands_one_queue(tp: int, cp: int, capability: int) -> bool:
    """Whether Megatron refuses to train with another value than 1.

    Args:
        capability: the GPU's major compute capability.
    """
    return max(tp, cp) > 1 and capability < _FIRST_THAT_NEEDS_NO_ORDER


def has_unusable_gpu() -> bool:
    """Whether this node has a GPU that PyTorch cannot use, and nobody has switched it off: training refuses then, or
    it would run on the CPU for as long as the job may take.
    """
    import torch  # here: moe-opt plan, which asks for other settings, runs without it

    is_off = os.environ.get("CUDA_VISIBLE_DEVICES") in _NO_GPU
    return not torch.cuda.is_available() and A_GPU.exists() and not is_off


def launches_in_turn() -> bool:
    """Whether what waits on one stream may hold up collectives that are launched after it on others: for want of a
    second hardware queue, or as NCCL keeps the order of launches over all communicators (from 2.26 on, where it is
    asked to).
    """
    return has_one_queue() or os.environ.get(LAUNCH_ORDER) == "1"


def has_one_queue() -> bool:
    """Whether all streams of this process share a hardware queue."""
    return os.environ.get(CONNECTIONS) == "1"


def needless_queue(tp: int, cp: int, capability: int) -> str | None:
    """Returns one sentence where a single queue costs overlap that nobody asked for, else
    None. See `demands_one_queue`.
    """
    if not has_one_queue() or demands_one_queue(tp, cp, capability):
        return None
    why = f"tensor parallelism {tp} and context parallelism {cp}" if max(tp, cp) == 1 else "this GPU"
    return (
        f"{CONNECTIONS} is 1, which Megatron does not need with {why}: work of one stream then waits for others', and "
        "less overlaps; set it to 32"
    )


def blocking_waits() -> str | None:
    """Returns one sentence where the host waits for messages that streams could wait for, else None."""
    value = os.environ.get(BLOCKING)
    if value is None or value.lower() not in _YES:
        return None
    return (
        f"{BLOCKING} is {value}: the host waits for each message, in the place of a stream, and launches nothing "
        "meanwhile, so that less overlaps; unset it"
    )


def too_few_queues(streams: int) -> str | None:
    """Returns one sentence where there are fewer hardware queues than streams, but several; else None. Of
    one, see `needless_queue`.
    """
    value = os.environ.get(CONNECTIONS)
    queues = _BY_DEFAULT if value is None else int(value) if value.isdecimal() else 1
    if queues == 1 or queues >= streams:
        return None
    is_set = f"is {value}" if value is not None else f"is not set, which means {queues}"
    return (
        f"{CONNECTIONS} {is_set}, and MoE layers use {streams} streams: some share a hardware queue, where one waits "
        "for another, and less overlaps; set it to 32"
    )
