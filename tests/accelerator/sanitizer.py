"""What PyTorch's CUDA sanitizer says of a schedule that the stream executor issues, as far as it would be told on CUDA:
kernels with the buffers that they read and write, records and waits. Collectives run on a stream of their group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.cuda._sanitizer import EventHandler

from megatron_moe_opt.schedules.schedule import Schedule
from tests.accelerator.executor_library import run_on_streams
from tests.accelerator.makespans import LANES, caller_lane
from tests.accelerator.software import CALLER


def races(library: Path, schedule: Schedule) -> list[str]:
    """Returns each race that the sanitizer finds, in one sentence; the caller fills the inputs before
    and reads everything after.
    """
    sanitizer, executor = _Told(), ctypes.CDLL(str(library))
    written = tuple(dict.fromkeys(name for op in schedule.ops for name in op.writes))
    left_running: dict[int, int] = {}

    def enqueue(stream: int, index: int, _: int) -> int:
        op = schedule.ops[index]
        if op.group is not None:
            communicator = sanitizer.stream_of(op.group)
            sanitizer.wait(communicator, sanitizer.record(stream))
            sanitizer.ran(communicator, str(op), op.reads, op.writes)
            left_running[index] = sanitizer.record(communicator)
        else:
            if op.meanwhile:
                sanitizer.ran(stream, f"first half of {op}", op.reads, op.writes)
                executor.issue_meanwhile()
            sanitizer.ran(stream, str(op), op.reads, op.writes)
        return 1

    def join(stream: int, index: int, _: int) -> None:
        if index in left_running:
            sanitizer.wait(stream, left_running[index])

    functions: dict[str, Callable[..., Any]] = {
        "current": lambda: CALLER, "record": lambda stream, _: sanitizer.record(stream), "wait": sanitizer.wait,
        "enqueue": enqueue, "join": join, "synchronize": lambda _: None, "seconds": lambda *_: 0.0,
    }  # fmt: skip
    sanitizer.ran(CALLER, "the inputs", (), tuple(schedule.inputs))
    ops = [(LANES.index(op.lane), op.waits_for, [None], op.meanwhile) for op in schedule.ops]
    run_on_streams(executor, functions, len(LANES), ops, caller_lane(schedule), record=False)
    sanitizer.ran(CALLER, "what comes after", written, (*schedule.inputs, *written))
    return sanitizer.said


class _Told:
    """Tells the sanitizer's own logic what runs. Streams and buffers have numbers."""

    def __init__(self) -> None:
        self._handler = EventHandler()
        self._numbers: dict[str, int] = {}
        self._events = 0
        self.said: list[str] = []

    def stream_of(self, group: str) -> int:
        return len(LANES) + self._number(f"group {group}")

    def ran(self, stream: int, what: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
        names = {self._number(name): [name] for name in (*reads, *writes)}
        written = {self._number(name) for name in writes}
        found = self._handler._handle_kernel_launch(stream, set(names) - written, written, set(), what, names)
        self.said += (f"{one.current_access.operator} and {one.previous_access.operator}" for one in found)

    def record(self, stream: int) -> int:
        self._events += 1
        self._handler._handle_event_creation(self._events)
        self._handler._handle_event_record(self._events, stream)
        return self._events

    def wait(self, stream: int, event: int) -> None:
        self._handler._handle_event_wait(event, stream)

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers) + 1)
