"""torch.cuda without a GPU: streams, events and devices that Megatron names unconditionally.

Megatron asks for `torch.cuda.current_device()`, makes side streams and events and allocates on "cuda" in code that a
CPU run reaches too (the alltoall dispatcher's `__init__`, rotary embedding, schedules, timers, checkpointing). On the
host there is one device and one stream, everything issued is complete when the call returns, and a device called
cuda, with or without an index, is the CPU.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from megatron_moe_opt.integration.patching import replace

# Functions of torch that take `device=` (and some `pin_memory=`) and are called by Megatron with a cuda device.
# fmt: off
FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "scalar_tensor", "tensor", "zeros", "zeros_like",
)
# fmt: on
TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")

# torch.cuda functions that have nothing to do on the host.
NO_OPS = ("synchronize", "set_device", "set_stream", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
# torch.cuda functions that answer with a number of bytes of device memory, of which the host backend keeps no account;
# memory_stats answers with many by name.
MEMORY_COUNTERS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class HostStream:
    """The host's only stream: work on it is finished when the call that issues it returns."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def synchronize(self) -> None:
        """Returns at once, as work on the host is never outstanding."""

    def wait_stream(self, stream: HostStream) -> None:
        """Returns at once, as the other stream has nothing outstanding."""

    def wait_event(self, event: HostEvent) -> None:
        """Returns at once, as an event of the host has happened when it is recorded."""

    def query(self) -> bool:
        """Returns True: work on the host is always complete."""
        return True

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Returns the event, or a new one, with the present time recorded in it."""
        event = event or HostEvent()
        event.record()
        return event


class HostEvent:
    """A point in time; Megatron's timers ask for the milliseconds between two."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs
        self._seconds = 0.0

    def record(self, stream: HostStream | None = None) -> None:
        """Records the present time, from which `elapsed_time` counts."""
        del stream
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Returns the milliseconds from this event to `end`."""
        return 1e3 * (end._seconds - self._seconds)

    def wait(self, stream: HostStream | None = None) -> None:
        """Returns at once, as an event of the host has happened when it is recorded."""

    def synchronize(self) -> None:
        """Returns at once, as work on the host is never outstanding."""

    def query(self) -> bool:
        """Returns True: an event on the host has always happened."""
        return True


@contextmanager
def host_stream_context(stream: HostStream | None) -> Iterator[None]:
    """Stands in for torch.cuda.stream and does nothing: there is only one stream to be on."""
    del stream
    yield


def host_device(device: Any) -> Any:
    """Map a CUDA device, given in any of PyTorch's ways, to the CPU; anything else is returned as it is."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return torch.device("cpu")
    if isinstance(device, str) and device.startswith("cuda"):
        return torch.device("cpu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a factory whose cuda device is the CPU. Pinned memory needs a CUDA driver and is plain memory here."""

    def create(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = host_device(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _to_host(to: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts `Tensor.to` and `Module.to`, whose first argument may be a device, a dtype or a
    tensor: CUDA is the CPU.
    """

    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (host_device(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = host_device(kwargs["device"])
        return to(self, *args, **kwargs)

    return move


def _cuda_type_names(type_: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts `Tensor.type` to answer by cuda names, the only ones by which optimizers and clipping sort parameters."""

    def answer(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return type_(self, *args, **kwargs)
        return type_(self).replace("torch.", "torch.cuda.", 1)

    return answer


def _same(value: object) -> Callable[[Any], Callable[..., Any]]:
    """Returns an adaptation that answers `value` whatever the arguments."""
    return lambda original: lambda *args, **kwargs: value


def _unchanged(original: Any) -> Callable[..., Any]:
    """Adapts methods that move or mark a tensor or module to return it as it is: it already is where it should be."""
    del original
    return lambda self, *args, **kwargs: self


def _what_can_be_freed(resize: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts `resize_` to leave memory alone that is not PyTorch's. Megatron frees a tensor that others still hold by a
    storage of no bytes (`resize_(0)`, in its 1F1B overlap).

    Memory of our pool on the host is not PyTorch's: it returns to the pool when the last tensor that holds it dies.
    """

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        return resize(self, size) if size or self.resizable() else self

    return resize_


def use_host_devices() -> None:
    """Make torch.cuda's names answer for the host."""
    cuda = torch.cuda
    for name, value in (("Stream", HostStream), ("Event", HostEvent), ("stream", host_stream_context)):
        replace(cuda, name, lambda original, value=value: value)
    only_stream = HostStream()
    for name in ("current_stream", "default_stream"):
        replace(cuda, name, _same(only_stream))
    replace(cuda, "current_device", _same(0))
    # The random seeds of tensor parallelism are set only where a device is counted.
    replace(cuda, "device_count", _same(1))
    replace(cuda, "get_device_name", _same("host"))
    # Compute capability 0.0 switches on nothing that asks for a minimum.
    replace(cuda, "get_device_capability", _same((0, 0)))
    replace(cuda, "get_device_properties", _same(SimpleNamespace(name="host", major=0, minor=0)))
    for name in NO_OPS:
        replace(cuda, name, _same(None))
    for name in MEMORY_COUNTERS:
        replace(cuda, name, _same(0))
    replace(cuda, "memory_stats", lambda original: lambda device=None: defaultdict(int))
    replace(cuda, "is_current_stream_capturing", _same(False))
    for name in ("range_push", "range_pop"):
        replace(cuda.nvtx, name, _same(0))

    for name in FACTORIES:
        replace(torch, name, _on_host)
    for name in TENSOR_FACTORIES:
        replace(torch.Tensor, name, _on_host)
    for owner in (torch.Tensor, torch.nn.Module):
        replace(owner, "to", _to_host)
        replace(owner, "cuda", _unchanged)
    replace(torch.Tensor, "pin_memory", _unchanged)
    replace(torch.Tensor, "record_stream", _same(None))
    replace(torch.Tensor, "type", _cuda_type_names)
    replace(torch.UntypedStorage, "resize_", _what_can_be_freed)
