"""What tensor operations read and write, which of them make the host wait, and what lies on the host.

All tensors are on the CPU. A tensor is the host's where it was made without naming a device, or from the host's; what
names a device, even as a torch.device of the CPU, is the accelerator's, and so is what is made from that. Copies to the
host are .cpu(), .to("cpu") and copies into pinned memory.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.accelerator.clocks import PACKAGE, Actor, Streams
from tests.accelerator.memory import Memory, tensors_in

READ_BY_HOST = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations whose result, or the shape of it, the host must know."""


ORDERS_FOR_ITS_CALLER = {"wait", "used_here"}
"""Functions of the package that order streams, or wait, where their caller wants it."""


def place() -> str | None:
    """The innermost place in the package that is running, as file:line."""
    frame = sys._getframe(1)
    while frame is not None:
        file = _of_package(frame.f_code.co_filename)
        if file is not None:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def ordering_places() -> list[str]:
    """The innermost place in the package that is running, and those that it orders streams for."""
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        file = _of_package(frame.f_code.co_filename)
        if file is not None:
            found.append(f"{file}:{frame.f_lineno}")
            if frame.f_code.co_name not in ORDERS_FOR_ITS_CALLER:
                break
        frame = frame.f_back
    return found


@functools.cache
def _of_package(file: str) -> str | None:
    return file[len(PACKAGE) :] if file.startswith(PACKAGE) else None


class Watch:
    """Watches which tensors operations use, and tells a memory of it."""

    def __init__(self, streams: Streams, memory: Memory) -> None:
        self.streams, self.memory = streams, memory
        self._running = threading.local()

    @property
    def names_device(self) -> bool | None:
        """Whether a factory that this thread runs is given a device. None: it runs none, what makes a tensor is PyTorch
        itself.
        """
        return getattr(self._running, "names_device", None)

    @contextmanager
    def making(self, on_device: bool) -> Iterator[None]:
        """Has what the block makes of nothing lie there."""
        outer, self._running.names_device = self.names_device, on_device
        try:
            yield
        finally:
            self._running.names_device = outer

    def is_host(self, tensor: torch.Tensor) -> bool:
        return self.memory.block(tensor).on_host

    def mark(self, tensor: torch.Tensor, on_host: bool) -> torch.Tensor:
        """A tensor that has just been made."""
        block = self.memory.block(tensor, self.streams.current, on_host)
        block.on_host, block.owner = on_host, self.streams.host if on_host else self.streams.current
        return tensor

    def settle(self, given: Sequence[torch.Tensor]) -> None:
        """Tells the side of an operation's arguments that are first seen in it from the others'."""
        known = [one for one in given if self.memory.knows(one) and not self.memory.block(one).named]
        of_host = bool(known) and all(map(self.is_host, known))
        for one in given:
            if not self.memory.knows(one):  # a list of numbers in Python, or a number
                if known and (of_host or one.untyped_storage().nbytes() == one.element_size()):
                    self.memory.block(one, self.streams.host, on_host=True)
            elif (block := self.memory.block(one)).named and known:
                block.named = False
                if of_host:
                    block.on_host, block.owner, block.accesses = True, self.streams.host, []

    def move(self, module: torch.nn.Module) -> torch.nn.Module:
        """Replaces Module.cuda, which moves what the module has and keeps it the same tensors."""
        for tensor in (*module.parameters(), *module.buffers()):
            if self.is_host(tensor):
                self.mark(tensor, on_host=False)
        return module

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of the host that copies may use while the host goes on."""
        self.memory.block(tensor).pinned = True
        return tensor

    def host_waits(self, why: str) -> None:
        """Notes that the host waits for all that is queued on the current stream."""
        self.streams.syncs.append(f"{why} at {place()}")
        self.streams.order(self.streams.host, self.streams.current.clock)

    def ran(self, what: str, reads: Any, writes: Any, new: Any = (), actor: Actor | None = None) -> None:
        """An operation ran: on the current stream, or on the host where all of it is the host's."""
        reads, writes, new = map(tensors_in, (reads, writes, new))
        used, unsettled = [*reads, *writes], actor is None and not reads and not writes
        for tensor in used:
            self.memory.block(tensor).named = False
        if actor is None:
            on_host = all(map(self.is_host, used)) if used else self.names_device is False
            actor = self.streams.host if on_host else self.streams.current
        for tensor in new:
            block = self.memory.block(tensor, actor, actor is self.streams.host)
            block.named = unsettled and actor is not self.streams.host
        if what == "empty":
            return
        time, where = self.streams.launch(actor, what), f"{what} ({place()})"
        for tensor in reads:
            self.memory.use(tensor, actor, time, False, where)
        for tensor in [*writes, *new]:
            self.memory.use(tensor, actor, time, True, where)


def watched_factory(watch: Watch, name: str, factory: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that makes a tensor: only its call in Python says whether a device is named."""

    def make(*arguments: Any, **settings: Any) -> Any:
        device = settings.get("device")
        named = device is not None and not (isinstance(device, str) and device == "cpu")
        with watch.making(named):
            made = factory(*arguments, **settings)
        if settings.get("pin_memory"):
            watch.pin(watch.mark(made, on_host=True))
        elif name in ("tensor", "from_numpy", "get_rng_state"):
            watch.mark(made, on_host=not named)
            if named:
                watch.host_waits("torch.tensor on the device")
        return made

    return make


def watched_methods(watch: Watch) -> dict[str, Callable[..., Any]]:
    """Tensor's methods that end in no operation, and copies between host and device."""
    stock = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "to")}

    def read(name: str) -> Callable[..., Any]:
        def method(tensor: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
            if not watch.is_host(tensor):
                watch.host_waits(name)
            host = watch.streams.host
            watch.memory.use(tensor, host, host.tick(), False, f"{name} ({place()})")
            return stock[name](tensor, *arguments, **settings)

        return method

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        if watch.is_host(tensor):
            return tensor
        copied = watch.mark(torch.clone(tensor), on_host=True)
        watch.host_waits("a copy to the host")  # into pageable memory
        return copied

    def to(tensor: torch.Tensor, *arguments: Any, **settings: Any) -> torch.Tensor:
        if "cpu" in arguments:
            return cpu(tensor)
        moved = stock["to"](tensor, *arguments, **settings)
        names_device = any(isinstance(one, torch.device) for one in (*arguments, *settings.values()))
        if not names_device or not watch.is_host(tensor):
            return moved
        if not (settings.get("non_blocking", False) and watch.memory.block(tensor).pinned):
            watch.host_waits("a copy from pageable memory")  # which CUDA starts when the stream is through
        return watch.mark(moved.clone() if moved is tensor else moved, on_host=False)

    def cuda(tensor: torch.Tensor, *_: Any, non_blocking: bool = False, **__: Any) -> torch.Tensor:
        return to(tensor, torch.device("cpu"), non_blocking=non_blocking)

    return {
        "tolist": read("tolist"),
        "numpy": read("numpy"),
        "cpu": cpu,
        "cuda": cuda,
        "to": to,
        "pin_memory": lambda tensor: watch.pin(tensor),
    }


class Operations(TorchDispatchMode):
    """Notes the operations that ATen runs."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self._watch
        name, written_arguments, is_view = _facts(func)
        if func.namespace == "c10d":
            return func(*args, **kwargs)  # see collectives.py
        given = tensors_in((args, kwargs))
        puts_a_number = _puts_a_number(name, args) and not watch.memory.knows(args[2])
        watch.settle(given)
        if puts_a_number and not watch.is_host(args[0]):
            watch.host_waits("a number put at places of a tensor")  # which is copied to the device
        if name in READ_BY_HOST or _has_mask(name, args) or _asks_for_size(name, kwargs):
            if any(not watch.is_host(tensor) for tensor in given):
                watch.host_waits(name)
        elif name == "copy_" and watch.is_host(args[0]) != watch.is_host(args[1]):
            runs_on = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            of_host = args[0] if watch.is_host(args[0]) else args[1]
            if not (runs_on and watch.memory.block(of_host).pinned):
                watch.host_waits("a copy between host and device")
        before = {tensor.untyped_storage()._cdata for tensor in given}
        result = func(*args, **kwargs)
        written: list[torch.Tensor] = []
        for index, argument in written_arguments:
            written += tensors_in(args[index] if index < len(args) else kwargs.get(argument))
        made = [one for one in tensors_in(result) if one.untyped_storage()._cdata not in before]
        if made or written or not is_view:
            watch.ran(name, given, written, made)
        return result


@functools.cache
def _facts(func: Any) -> tuple[str, list[tuple[int, str]], bool]:
    """An operation's name, the places and names of the arguments that it writes, and whether its results are views."""
    schema = func._schema
    written = [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    aliases = [one.alias_info for one in schema.returns]
    is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    return schema.name.rpartition("::")[2], written, is_view


def _has_mask(name: str, args: Any) -> bool:
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _puts_a_number(name: str, args: Any) -> bool:
    """Whether an operation may be tensor[index] = number: Python makes a tensor of that on the host."""
    return name in ("index_put", "index_put_", "_index_put_impl_") and args[2].dim() == 0


def _asks_for_size(name: str, kwargs: Any) -> bool:
    return name == "repeat_interleave" and kwargs.get("output_size") is None
