"""What tensor operations read and write, which of them make the host wait, and what lies on the host.

All tensors are on the CPU. A tensor is the host's where it was made without naming a device, or from the host's; what
names a device, even as a torch.device of the CPU, is the accelerator's, and so is what is made from that. Copies to the
host are .cpu(), .to("cpu") and copies into pinned memory.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.accelerator.clocks import Actor, Stream, Streams
from tests.accelerator.memory import Memory, tensors_in

PACKAGE = Path(__file__).parents[2] / "megatron_moe_opt"
READ_BY_HOST = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations whose result, or the shape of it, the host must know."""


def place() -> str | None:
    """The innermost place in the package that is running, as file:line."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(str(PACKAGE)):
            return f"{Path(frame.filename).relative_to(PACKAGE)}:{frame.lineno}"
    return None


class Watch:
    """Uses of tensors, told to a memory."""

    def __init__(self, streams: Streams, memory: Memory) -> None:
        self.streams, self.memory = streams, memory
        self.syncs: list[str] = []
        """Where the host waited for the device."""
        self.names_device = False
        """Whether a factory that runs is given a device."""

    def is_host(self, tensor: torch.Tensor) -> bool:
        return self.memory.block(tensor).on_host

    def mark(self, tensor: torch.Tensor, on_host: bool) -> torch.Tensor:
        """A tensor that has just been made."""
        self.memory.block(tensor, self.streams.current, on_host).on_host = on_host
        return tensor

    def host_waits(self, why: str) -> None:
        """The host waits for all that is queued on the current stream."""
        self.syncs.append(f"{why} at {place()}")
        self.streams.order(self.streams.host, self.streams.current.clock, None)

    def ran(self, what: str, reads: Any, writes: Any, new: Any = (), actor: Actor | None = None) -> None:
        """An operation ran: on the current stream, or on the host where all of it is the host's."""
        reads, writes, new = (list(tensors_in(ones)) for ones in (reads, writes, new))
        used = [*reads, *writes]
        if actor is None:
            on_host = all(map(self.is_host, used)) if used else not self.names_device
            actor = self.streams.host if on_host else self.streams.current
        time = self.streams.launch(actor)
        for tensor in new:
            if not self.memory.knows(tensor):
                self.memory.block(tensor, actor, actor is self.streams.host)
        where = f"{what} ({place()})"
        time = self.streams.launch(actor) if new else time
        for tensor in reads:
            self.memory.use(tensor, actor, time, False, where)
        for tensor in [*writes, *new]:
            self.memory.use(tensor, actor, time, True, where)


class Functions(TorchFunctionMode):
    """What only the call in Python says: whether a device is named, and methods that end in no operation."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, watch = getattr(func, "__name__", ""), self._watch
        if name == "record_stream":
            watched = place()
            watch.streams.used.add(watched)
            if watched != watch.streams.without:
                watch.memory.record(args[0], args[1].actor)
            return None
        if name in ("tolist", "numpy", "__array__"):
            if not watch.is_host(args[0]):
                watch.host_waits(name)
            watch.memory.use(args[0], watch.streams.host, watch.streams.host.tick(), False, f"{name} ({place()})")
            return func(*args, **kwargs)
        if name == "cpu" or (name == "to" and "cpu" in args[1:]):
            return self._to_host(args[0], kwargs.get("non_blocking", False))
        if name == "to" and any(isinstance(one, torch.device) for one in (*args[1:], *kwargs.values())):
            return self._to_device(func, args, kwargs)
        if name == "pin_memory":
            watch.memory.block(args[0]).pinned = True
            return args[0]
        pinned, outer = kwargs.pop("pin_memory", False), watch.names_device
        device = kwargs.get("device")
        watch.names_device = device is not None and device != "cpu"
        try:
            result = func(*args, **kwargs)
        finally:
            watch.names_device, named = outer, watch.names_device
        if name in ("tensor", "as_tensor", "from_numpy"):
            watch.mark(result, on_host=not named)
            if named and name == "tensor":
                watch.host_waits("torch.tensor on the device")
        elif pinned:
            watch.mark(result, on_host=True)
            watch.memory.block(result).pinned = True
        return result

    def _to_host(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        watch = self._watch
        if watch.is_host(tensor):
            return tensor
        copied = watch.mark(torch.clone(tensor), on_host=True)
        watch.host_waits("a copy to the host")  # pageable memory: non_blocking does not help
        return copied

    def _to_device(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        watch, result = self._watch, func(*args, **kwargs)
        if not watch.is_host(args[0]):
            return result
        if not (kwargs.get("non_blocking", False) and watch.memory.block(args[0]).pinned):
            watch.host_waits("a copy from pageable memory")  # which CUDA starts when the stream is through
        copied = result.clone() if result is args[0] else result
        return watch.mark(copied, on_host=False)


class Operations(TorchDispatchMode):
    """What ATen runs."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self._watch
        name = func._schema.name.rpartition("::")[2]
        if func.namespace == "c10d":
            return func(*args, **kwargs)  # see collectives.py
        given = list(tensors_in((args, kwargs)))
        if name in READ_BY_HOST or _has_mask(name, args) or _asks_for_size(name, kwargs):
            if any(not watch.is_host(tensor) for tensor in given):
                watch.host_waits(name)
        elif name == "copy_" and watch.is_host(args[0]) != watch.is_host(args[1]):
            on_host = args[0] if watch.is_host(args[0]) else args[1]
            if not (kwargs.get("non_blocking", args[2] if len(args) > 2 else False) and watch.memory.block(on_host).pinned):
                watch.host_waits("a copy between host and device")
        known = {tensor.untyped_storage()._cdata for tensor in given}
        result = func(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        made = [one for one in tensors_in(result) if one.untyped_storage()._cdata not in known]
        if made or written or not _is_view(func):
            watch.ran(name, given, written, made)
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _has_mask(name: str, args: Any) -> bool:
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _asks_for_size(name: str, kwargs: Any) -> bool:
    return name == "repeat_interleave" and kwargs.get("output_size") is None


__all__ = ["Functions", "Operations", "Stream", "Watch", "place"]
