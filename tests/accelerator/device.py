"""An accelerator in software under a rank's own code: what it would do wrong on CUDA and NCCL, found on a CPU.

Inside the block tensors on the CPU count as the device's. The package's code for CUDA runs, the executor's issuing
logic included (compiled from csrc/pipeline/stream_executor.cpp); work is done at once, in the order of issue, so that
results are right and events have the times of this machine, and vector clocks tell what would not have been ordered on
streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.distributed import distributed_c10d

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.integration.host.devices import FACTORIES
from megatron_moe_opt.kernels import streams as package_streams
from megatron_moe_opt.row_format import WireFormat
from megatron_moe_opt.runtime.engine import collectives as package_collectives
from megatron_moe_opt.runtime.engine import executor, host_copy, started
from tests.accelerator.clocks import Actor, Clock, Event, Stream, Streams, merge
from tests.accelerator.collectives import MESSAGES, Communicators, Findings
from tests.accelerator.executor_library import run_on_streams
from tests.accelerator.memory import Memory, Region, tensors_in
from tests.accelerator.watch import Operations, Watch, ordering_places, place, watched_factory, watched_methods

_MEGATRONS = {"all_gather_into_tensor": "dist_all_gather_func", "reduce_scatter_tensor": "dist_reduce_scatter_func"}
_MEGATRONS_STREAMS = [
    (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream"), (SharedExpertMLP, "stream"),
    (pipeline_utils, "_COMP_STREAM"), (pipeline_utils, "_COMM_STREAM"),
]  # fmt: skip
"""The streams of Megatron's that are made once a process."""
_tolist = torch.Tensor.tolist  # of the host, whatever is patched later
HOST_ONLY = {
    "plan_exchange", "share_out", "plan_hops", "place_samples", "solve_placement", "build_info", "select_cpu_kernels",
}  # fmt: skip
WRITES_LAST = {"sr_decode", "convert_rows", "sum_rows"}  # the argument in which the result is, or may be


class Accelerator:
    """An accelerator that watches a rank, and what it found.

    Attributes:
        mistakes: races, and memory given back too early.
        syncs: where the host waited for the device.
        used: places in the package that order streams.
        issued_halfway: of each run that left something to be issued halfway through experts, the ops that were.
    """

    def __init__(self, without: str | None = None) -> None:
        self.streams = Streams(without)
        self.memory = Memory(self.streams)
        self.watch = Watch(self.streams, self.memory)
        self.communicators = Communicators(self.watch)
        self.issued_halfway: list[int] = []

    @property
    def mistakes(self) -> list[str]:
        return self.memory.mistakes

    @property
    def syncs(self) -> list[str]:
        return self.streams.syncs

    def findings(self) -> Findings:
        """Returns what ranks are compared by."""
        return Findings(self.mistakes, self.communicators.issued, self.communicators.members)

    @property
    def used(self) -> set[str]:
        return self.streams.used


@contextmanager
def accelerator(library: Path, without: str | None = None) -> Iterator[Accelerator]:
    """Runs the block on an accelerator in software.

    Args:
        library: of executor_library.build.
        without: a place in the package, `file:line`, whose waits and record_streams are left out.
    """
    found = Accelerator(without)
    with pytest.MonkeyPatch.context() as patch:
        _patch_torch(patch, found)
        _patch_package(patch, found, library)
        for name, function in found.communicators.functions().items():
            patch.setattr(dist, name, function)
            if name in MESSAGES:  # of which a batch is made
                patch.setattr(distributed_c10d, name, function)
            for module in (layers, mappings, param_and_grad_buffer):  # which have looked it up when they were imported
                if hasattr(module, _MEGATRONS.get(name, "")):
                    patch.setattr(module, _MEGATRONS[name], function)
        with Operations(found.watch):
            yield found
    found.memory.forget()


def _patch_torch(patch: pytest.MonkeyPatch, found: Accelerator) -> None:
    streams = found.streams

    @contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        with nullcontext() if stream is None else streams.on(stream.actor):
            yield

    def synchronize(*_: Any) -> None:
        streams.syncs.append(f"torch.cuda.synchronize at {place()}")
        for actor in (streams.current, *streams.of_groups.values()):
            streams.order(streams.host, actor.clock)

    for kind in (Stream, Event):
        patch.setattr(kind, "streams", streams, raising=False)
        patch.setattr(kind, "place", staticmethod(place), raising=False)
        patch.setattr(kind, "places", staticmethod(ordering_places), raising=False)

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        if not streams.leaves_out(ordering_places()):
            found.memory.record(tensor, stream.actor)

    patch.setattr(torch.Tensor, "record_stream", record_stream)
    for name, method in watched_methods(found.watch).items():
        patch.setattr(torch.Tensor, name, method)
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if size == 0:
            found.memory.give_back(storage)
        return resize(storage, size)

    patch.setattr(torch.UntypedStorage, "resize_", resize_)
    patch.setattr(torch.nn.Module, "cuda", lambda module, *_: found.watch.move(module))
    for name in (*FACTORIES, "from_numpy", "get_rng_state"):
        patch.setattr(torch, name, watched_factory(found.watch, name, getattr(torch, name)))
    cuda = {
        "Stream": Stream, "ExternalStream": Stream, "Event": Event, "stream": on, "synchronize": synchronize,
        "current_stream": lambda *_: Stream(actor=streams.current),
        "default_stream": lambda *_: Stream(actor=streams.default),
        "current_device": lambda: torch.device("cpu"), "device": lambda *_: nullcontext(),
    }  # fmt: skip
    for name, value in cuda.items():
        patch.setattr(torch.cuda, name, value)
    for owner, name in _MEGATRONS_STREAMS:
        patch.setattr(owner, name, None)


def _patch_package(patch: pytest.MonkeyPatch, found: Accelerator, library: Path) -> None:
    extension = load_extension()
    patch.setattr(package_streams, "STREAMED", {"cuda", "cpu"})
    patch.setattr(package_collectives, "_on_gloo", lambda _: found.communicators.on_host)
    patch.setattr(started, "_queues", {})
    patch.setattr(host_copy.HostCopy, "__init__", _host_copy(found, host_copy.HostCopy.__init__))
    patch.setattr(executor, "_executor", lambda *_: software)
    patch.setattr(executor, "_in_use", set())
    patch.setattr(extension, "StreamExecutor", lambda _: _Runner(found, library), raising=False)
    patch.setattr(extension, "new_cuda_stream", lambda _: 0, raising=False)
    software = executor.Executor(torch.device("cpu"))
    actions = {"exchange": _exchange, "copy_rows": _copy_rows, "sum_parts": _sum_parts, "call_python": _call_python}
    actions["convert_chunks"] = _convert_chunks
    for name in dir(extension):
        function = getattr(extension, name)
        if name.startswith("_") or isinstance(function, type) or not callable(function):
            continue
        if name in actions:
            patch.setattr(extension, name, actions[name](found, function))
        elif not name.startswith("host_pool") and name not in ("StreamExecutor", "new_cuda_stream"):
            patch.setattr(extension, name, _watched(found, name, function))


def _host_copy(found: Accelerator, make: Callable[..., None]) -> Callable[..., None]:
    """Adapts HostCopy, which on a GPU sees from a tensor's device that it is the host's already."""

    def init(copy: host_copy.HostCopy, tensor: torch.Tensor) -> None:
        if found.watch.is_host(tensor):
            copy._host, copy._arrived = tensor, None
        else:
            make(copy, tensor)

    return init


def _watched(found: Accelerator, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Watches a function of the extension, which reads its arguments and makes its results."""

    def run(*arguments: Any) -> Any:
        watch = found.watch
        if name == "empty":
            made = function(*arguments)
            watch.ran(name, (), (), made, actor=found.streams.current)
            return made
        if name == "build_row_map" and arguments[1] is None:
            watch.host_waits("counting routed pairs")
        if name in HOST_ONLY:
            watch.ran(name, arguments, (), actor=found.streams.host)
            with watch.making(on_device=False):
                result = function(*arguments)
            for one in tensors_in(result):
                watch.mark(one, on_host=True)
            return result
        out = arguments[-1] if name in WRITES_LAST else None
        result = function(*arguments)
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in(arguments)}
        made = [one for one in tensors_in(result) if one.untyped_storage()._cdata not in given]
        reads = arguments[:-1] if name in WRITES_LAST else arguments
        watch.ran(name, reads, [] if out is None else out, made)
        return result

    return run


class _Action:
    """An action of an op: what it does, now, on the current stream."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run, self.work = run, None

    def run(self) -> None:
        self.work = self._run()

    def join(self) -> None:
        if self.work is not None:
            self.work.wait()


def _exchange(found: Accelerator, function: Callable[..., Any]) -> Callable[..., _Action]:
    def make(group: Any, sent: Any, to: Any, received: Any, of: Any) -> _Action:
        real = function(group, sent, to, received, of)
        if found.communicators.on_host:
            return real
        rank = group.rank()

        def run() -> Any:
            own, place_of_own = sent.narrow(0, *to[rank]), received.narrow(0, *of[rank])
            if own.numel() and own.data_ptr() != place_of_own.data_ptr():
                found.watch.ran("copy of the own block", own, place_of_own)
            reads = [sent.narrow(0, *block) for peer, block in enumerate(to) if peer != rank]
            writes = [received.narrow(0, *block) for peer, block in enumerate(of) if peer != rank]
            return found.communicators.issue(group, "exchange", reads, writes, real.run)

        return _Action(run)

    return make


def _copy_rows(found: Accelerator, function: Callable[..., Any]) -> Callable[..., _Action]:
    def make(source: Any, source_byte: int, target: Any, target_byte: int, row_bytes: int, chunks: Any) -> _Action:
        real = function(source, source_byte, target, target_byte, row_bytes, chunks)
        sides = (source, source_byte, row_bytes), (target, target_byte, row_bytes)
        return _moved(found, "copy_rows", real, sides, chunks)

    return make


def _convert_chunks(found: Accelerator, function: Callable[..., Any]) -> Callable[..., _Action]:
    def make(source: Any, source_wire: str, target: Any, target_wire: str, hidden: int, chunks: Any) -> _Action:
        real = function(source, source_wire, target, target_wire, hidden, chunks)
        sides = ((source, source_wire), (target, target_wire))
        return _moved(found, "convert_chunks", real, [
            (rows, 0, WireFormat(wire).payload_bytes(hidden, rows.dtype)) for rows, wire in sides
        ], chunks)  # fmt: skip

    return make


def _moved(found: Accelerator, name: str, real: Any, sides: Sequence[Any], chunks: Any) -> _Action:
    froms, tos, counts = map(_tolist, chunks[:3])  # the host knows what it has sent there

    def run() -> None:
        real.run()
        watch, memory = found.watch, found.memory
        time, where = found.streams.launch(found.streams.current), f"{name} ({place()})"
        for part in chunks[:3]:
            memory.use(part, found.streams.current, time, False, where)
        for (tensor, first_byte, row_bytes), rows, writes in zip(sides, (froms, tos), (False, True), strict=True):
            for first, count in _joined(rows, counts):
                region = _columns(tensor, first, count, first_byte, row_bytes)
                memory.use_region(memory.block(tensor), region, watch.streams.current, time, writes, where)

    return _Action(run)


def _joined(firsts: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, count in sorted(zip(firsts, counts, strict=True)):
        if joined and sum(joined[-1]) == first:
            joined[-1] = joined[-1][0], joined[-1][1] + count
        elif count:
            joined.append((first, count))
    return joined


def _columns(tensor: torch.Tensor, row: int, rows: int, first_byte: int, num_bytes: int) -> Region:
    """Returns the region of bytes [first_byte, first_byte + num_bytes) of rows of a contiguous tensor."""
    pitch = tensor.stride(0) * tensor.element_size()
    begin = tensor.storage_offset() * tensor.element_size() + row * pitch
    if num_bytes == pitch:
        return Region(begin, begin + rows * pitch)
    left = (begin + first_byte) % pitch
    end = begin + (rows - 1) * pitch + first_byte + num_bytes
    return Region(begin + first_byte, end, pitch, left, left + num_bytes)


def _sum_parts(found: Accelerator, function: Callable[..., Any]) -> Callable[..., _Action]:
    def make(parts: Any, out: Any, first_byte: int, width: int, dtype: torch.dtype | str) -> _Action:
        real = function(parts, out, first_byte, width, dtype)
        is_dtype = isinstance(dtype, torch.dtype)
        num_bytes = width * dtype.itemsize if is_dtype else WireFormat(dtype).payload_bytes(width, out.dtype)

        def run() -> None:
            real.run()
            memory, current = found.memory, found.streams.current
            time, where = found.streams.launch(current), f"sum_parts ({place()})"
            for tensor, writes in [*((part, False) for part in parts), (out, True)]:
                region = _columns(tensor, 0, tensor.size(0), first_byte, num_bytes)
                if tensor.size(0):
                    memory.use_region(memory.block(tensor), region, current, time, writes, where)

        return _Action(run)

    return make


def _call_python(found: Accelerator, function: Callable[..., Any]) -> Callable[..., _Action]:
    return lambda called: _Action(called)


class _Runner:
    """_C.StreamExecutor, its issuing logic on this accelerator's streams."""

    def __init__(self, found: Accelerator, library: Path) -> None:
        self._found, self._library = found, ctypes.CDLL(str(library))
        self._lanes: list[Actor] = []
        self._begun = 0
        """The ops that were issued, of all runs."""

    def run(self, ops: Sequence[Any], caller_lane: int, record: bool) -> tuple[tuple[int, int, str] | None, list[Any]]:
        """Does what Executor.run of the extension does."""
        streams = self._found.streams
        for lane in executor._LANES[len(self._lanes) :]:
            self._lanes.append(streams.new(f"lane {lane.value}", follows=True))
        events: list[Clock] = []
        recorded: list[float] = []
        raised: list[BaseException] = []
        if any(meanwhile for *_, meanwhile in ops):
            self._found.issued_halfway.append(0)

        def actor(number: int) -> Actor:
            return caller if number < 0 else self._lanes[number]

        def record_event(stream: int, _: int) -> int:
            merge(actor(stream).clock, streams.host.clock)
            events.append(dict(actor(stream).clock))
            recorded.append(perf_counter())
            return len(events) - 1

        def wait(stream: int, event: int) -> None:
            streams.order(actor(stream), events[event])

        def enqueue(stream: int, op: int, action: int) -> int:
            self._begun += action == 0
            try:
                with streams.on(actor(stream)):
                    ops[op][2][action].run()
            except BaseException as error:
                raised.append(error)
                return 0
            return 1

        def join(stream: int, op: int, action: int) -> None:
            work = ops[op][2][action].work
            if work is not None:
                with streams.on(actor(stream)):
                    work.wait()

        caller = streams.current
        functions = {
            "current": lambda: -1, "record": record_event, "wait": wait, "enqueue": enqueue, "join": join,
            "synchronize": lambda stream: streams.order(streams.host, actor(stream).clock),
            "seconds": lambda first, second: recorded[second] - recorded[first],
        }  # fmt: skip
        failure, times = run_on_streams(self._library, functions, len(self._lanes), ops, caller_lane, record)
        if raised:
            raise raised[0]
        return None if failure is None else (failure[0], -1, failure[1]), times

    def issue_meanwhile(self) -> None:
        """Does what StreamExecutor.issue_meanwhile of the extension does."""
        before = self._begun
        self._library.issue_meanwhile()
        if self._begun > before:
            self._found.issued_halfway[-1] += self._begun - before
