"""A rank of the pool whose GPU is the emulator: random numbers and streams of torch.cuda, and NCCL over Gloo.

So a test of several ranks runs as with GPUs: what is left on the host by mistake meets tensors of another device, and
collectives of a group take the device's tensors alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.integration.auto import memory_room
from megatron_moe_opt.integration.host import devices, rng


class _StandIn(type):
    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, _distributed_c10d.Backend) and one.name() == "nccl"


class _Nccl(metaclass=_StandIn):
    """ProcessGroupNCCL, as far as torch.distributed calls it: process_group.cpp over a group of Gloo."""

    class Options(SimpleNamespace):
        """Attributes that callers set."""

        def __init__(self, **given: Any) -> None:
            super().__init__(config=SimpleNamespace(), **{"_timeout": None, "is_high_priority_stream": False} | given)

    def __new__(cls, store: Any, rank: int, size: int, options: Options) -> Any:
        gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        stand_in = ctypes.PyDLL(load_extension().__file__).emulator_nccl
        stand_in.argtypes, stand_in.restype = (ctypes.py_object, ctypes.py_object), ctypes.py_object
        return stand_in(gloo, options)


class _Device:
    """torch.cuda.device: there is one."""

    def __init__(self, device: Any) -> None:
        del device

    def __enter__(self) -> None:
        """Nothing to change."""

    def __exit__(self, *_: object) -> None:
        """Nothing to change back."""


def _zeros_stay(deallocate: Any) -> Any:
    """Adapts Megatron's freeing of what a stage has sent, the last stage's loss too, which it then multiplies with the
    scale of losses: a loss is zeroed.
    """

    def run(out: torch.Tensor | None, *arguments: Any) -> None:
        deallocate(out, *arguments)
        if out is not None and out.numel() == 1:
            out.data.zero_()

    return run


def _kept(resize: Any) -> Any:
    """Adapts `resize_` to keep what Megatron frees by hand: a PyTorch without CUDA has no way to give
    back a storage of its memory.
    """
    return lambda storage, size: storage if storage.device.type == "cuda" and size == 0 else resize(storage, size)


def _layer_norm(
    rows: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, *_: Any,
) -> torch.Tensor:  # fmt: skip
    """Replaces torch.layer_norm, whose backward pass on a CPU has no kernel for all that CUDA's takes: rows
    and weights of two dtypes.
    """
    over = [-1 - dim for dim in range(len(shape))]
    centred = rows.float() - rows.float().mean(over, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(over, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).type_as(rows)


def use_emulated_gpu() -> None:
    """What torch.cuda and torch.distributed lack in a PyTorch without CUDA."""
    rng.use_host_generator()
    only_stream, emulator = devices.HostStream(), ctypes.CDLL(load_extension().__file__)
    allocated, most_allocated = emulator.emulator_allocated, emulator.emulator_most_allocated
    allocated.restype = most_allocated.restype = ctypes.c_int64
    memory = (allocated, most_allocated, most_allocated, most_allocated)
    answers: dict[str, Any] = {
        "Stream": devices.HostStream, "ExternalStream": devices.HostStream, "Event": devices.HostEvent,
        "stream": devices.host_stream_context, "set_stream": lambda stream: None,
        "current_stream": lambda device=None: only_stream, "default_stream": lambda device=None: only_stream,
        "set_device": lambda device: None, "device": _Device,
        "get_device_name": lambda device=None: "emulator", "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(name="emulator", major=9, minor=0),
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None, "ipc_collect": lambda: None,
        "reset_peak_memory_stats": lambda device=None: emulator.emulator_reset_most_allocated(),
    } | {
        name: lambda device=None, of=of: of() for name, of in zip(devices.MEMORY_COUNTERS, memory, strict=True)
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0
    torch.cuda.nccl.version = lambda: (0, 0, 0)
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.UntypedStorage.resize_ = _kept(torch.UntypedStorage.resize_)
    torch.layer_norm = _layer_norm
    torch.compiler.set_stance("force_eager")
    schedules.deallocate_output_tensor = _zeros_stay(schedules.deallocate_output_tensor)
    memory_room.COMMUNICATOR_BYTES = 0  # of a GPU: Gloo has the host's
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = torch.distributed.ProcessGroupNCCL = _Nccl
