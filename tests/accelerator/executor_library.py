"""The stream executor of csrc/pipeline, compiled by itself, on streams in software."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tests.accelerator.software import CALLER, Adversary, Device, Entry, play

ROOT = Path(__file__).parents[2]
EXECUTOR = "csrc/pipeline/stream_executor.cpp"
SOURCES = (EXECUTOR, "csrc/pipeline/executor.cpp", "tests/accelerator/c_executor.cpp")

_int, _long, _double = ctypes.c_int, ctypes.c_int64, ctypes.c_double
_SIGNATURES = {
    "current": ctypes.CFUNCTYPE(_long),
    "record": ctypes.CFUNCTYPE(_int, _long, _int),
    "wait": ctypes.CFUNCTYPE(None, _long, _int),
    "enqueue": ctypes.CFUNCTYPE(_int, _long, _int, _int),
    "join": ctypes.CFUNCTYPE(None, _long, _int, _int),
    "synchronize": ctypes.CFUNCTYPE(None, _long),
    "seconds": ctypes.CFUNCTYPE(_double, _int, _int),
}


class _Functions(ctypes.Structure):
    _fields_ = list(_SIGNATURES.items())


def build(folder: Path, mutate: Callable[[str], str] | None = None) -> Path:
    """Compiles the library into `folder`, which may hold what another build has left there.

    Args:
        mutate: makes other text of stream_executor.cpp.
    """
    compiler = [*([shutil.which("ccache")] if shutil.which("ccache") else []), "c++", "-std=c++17", "-fPIC"]
    objects = []
    for path in SOURCES:
        source, compiled = ROOT / path, folder / f"{Path(path).stem}.o"
        if mutate is not None and path == EXECUTOR:
            source, compiled = folder / "mutant.cpp", folder / "mutant.o"
            source.write_text(mutate((ROOT / path).read_text()))
            compiled.unlink(missing_ok=True)
        if not compiled.exists():
            include = f"-I{ROOT / 'csrc/pipeline'}"
            subprocess.run([*compiler, include, "-c", str(source), "-o", str(compiled)], check=True)
        objects.append(str(compiled))
    handle, library = tempfile.mkstemp(".so", dir=folder)  # a name of its own: libraries of one name are loaded once
    os.close(handle)
    subprocess.run(["c++", "-shared", *objects, "-o", library, "-pthread"], check=True)
    return Path(library)


@dataclass(frozen=True)
class Work:
    """What an action of an op puts on a device."""

    run: Callable[[], None] | None = None
    seconds: float = 0.0
    group: Hashable = None
    """The communicator of a collective, on whose stream it is left running; None: the work is no collective."""
    blocks: bool = False
    label: str = ""


class Refused(ValueError):
    """Ops that the executor does not take."""


class SoftwareExecutor:
    """Runs ops on a device in software, as StreamExecutor does on CUDA."""

    def __init__(self, library: Path, num_lanes: int) -> None:
        self._library = ctypes.CDLL(str(library))
        self._num_lanes = num_lanes

    def issue_meanwhile(self) -> None:
        """Does what StreamExecutor.issue_meanwhile does, for an action."""
        self._library.issue_meanwhile()

    def issue(
        self,
        device: Device,
        ops: Sequence[tuple[int, Sequence[int], Sequence[Callable[[], Work]], int]],
        caller_lane: int,
        record: bool = False,
        adversary: Adversary | None = None,
    ) -> tuple[tuple[int, str] | None, list[tuple[float, float]]]:
        """Puts (lane, waits for, actions, issued halfway) of each op on the device; what failed, and with `record` the
        virtual times.

        Args:
            ops: an action is called when the executor issues it.
            adversary: who runs what the host waits for; None: nothing runs, and the host waits for nothing.
        """
        events: list[Entry | None] = []
        left_running: dict[tuple[int, int], Entry] = {}

        def record_event(stream: int, timed: int) -> int:
            events.append(device.last.get(stream))
            return len(events) - 1

        def wait(stream: int, event: int) -> None:
            device.launch(stream, [events[event]])

        def enqueue(stream: int, op: int, action: int) -> int:
            try:
                work = ops[op][2][action]()
            except RuntimeError:
                return 0
            fields = {"run": work.run, "seconds": work.seconds, "blocks": work.blocks, "label": work.label}
            if work.group is None:
                device.launch(stream, **fields)
            else:
                behind = [device.last.get(stream)]
                left_running[op, action] = device.launch(("group", work.group), behind, **fields)
            return 1

        def join(stream: int, op: int, action: int) -> None:
            if (op, action) in left_running:
                device.launch(stream, [left_running[op, action]])

        def synchronize(stream: int) -> None:
            if adversary is not None:
                adversary.run_until(device.last.get(stream))

        def seconds(first: int, second: int) -> float:
            ends = []
            for entry in (events[first], events[second]):
                if adversary is not None and entry is not None and not entry.ended:
                    ends.append(float("nan"))  # CUDA refuses
                else:
                    ends.append(0.0 if entry is None else play(device)[entry][1])
            return ends[1] - ends[0]

        functions = {
            "current": lambda: CALLER, "record": record_event, "wait": wait, "enqueue": enqueue, "join": join,
            "synchronize": synchronize, "seconds": seconds,
        }  # fmt: skip
        return run_on_streams(self._library, functions, self._num_lanes, ops, caller_lane, record)


def run_on_streams(
    library: ctypes.CDLL,
    functions: Mapping[str, Callable[..., Any]],
    num_lanes: int,
    ops: Sequence[tuple[int, Sequence[int], Sequence[Any], int]],
    caller_lane: int,
    record: bool,
) -> tuple[tuple[int, str] | None, list[tuple[float, float]]]:
    """Has the executor issue (lane, waits for, actions, issued halfway) of each op; what failed, and with `record` the
    times.

    Args:
        functions: an accelerator's, by their names in Streams. Actions are named by the numbers of op and action.
    """
    called = _Functions(*(signature(functions[name]) for name, signature in _SIGNATURES.items()))
    lanes, waits_for, actions, meanwhile = zip(*ops, strict=True) if ops else ((), (), (), ())
    waits = list(chain.from_iterable(waits_for))
    spans = (_double * (2 * len(ops)))()
    reason = ctypes.create_string_buffer(400)
    failed = library.run_on_streams(
        ctypes.byref(called), num_lanes, len(ops), _array(lanes), _array([len(of_op) for of_op in waits_for]),
        _array(waits), _array([len(of_op) for of_op in actions]), _array(meanwhile), caller_lane,
        spans if record else None, reason, len(reason),
    )  # fmt: skip
    if failed == -2:
        raise Refused(reason.value.decode())
    times = list(zip(spans[::2], spans[1::2], strict=True)) if record else []
    return None if failed < 0 else (failed, reason.value.decode()), times


def _array(numbers: Sequence[int]) -> ctypes.Array:
    return (_int * max(1, len(numbers)))(*numbers)
