"""A rank of the pool whose GPU is the emulator: random numbers and streams of torch.cuda, and NCCL over Gloo.

So a test of several ranks runs as with GPUs: what is left on the host by mistake meets tensors of another device, and
collectives of a group take the device's tensors alone.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

from megatron_moe_opt.integration.host import devices, rng
from megatron_moe_opt.kernels.extension import load_extension


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


def use_emulated_gpu() -> None:
    """What torch.cuda and torch.distributed lack in a PyTorch without CUDA."""
    rng.use_host_generator()
    only_stream = devices.HostStream()
    answers: dict[str, Any] = {
        "Stream": devices.HostStream, "ExternalStream": devices.HostStream, "Event": devices.HostEvent,
        "stream": devices.host_stream_context, "set_stream": lambda stream: None,
        "current_stream": lambda device=None: only_stream, "default_stream": lambda device=None: only_stream,
        "set_device": lambda device: None, "device": lambda device: nullcontext(),
        "get_device_name": lambda device=None: "emulator", "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(name="emulator", major=9, minor=0),
        "is_current_stream_capturing": lambda: False,
    } | {name: lambda device=None: 0 for name in devices.MEMORY_COUNTERS} | {
        name: lambda *_: None for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats")
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0
    torch.cuda.nccl.version = lambda: (0, 0, 0)
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.compiler.set_stance("force_eager")
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = torch.distributed.ProcessGroupNCCL = _Nccl
