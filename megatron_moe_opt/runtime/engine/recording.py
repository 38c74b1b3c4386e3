"""When ops ran, for whoever wants to see it: those of schedules, and those that run beside all schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import TracebackType

import torch

from megatron_moe_opt.runtime.observed.layer_pass import DeviceClock, HostClock, Instant
from megatron_moe_opt.schedules.schedule import Schedule
from megatron_moe_opt.schedules.timeline import Timeline


def clock() -> type[HostClock] | type[DeviceClock]:
    """What a process that has a CUDA device in use measures with, or one that has none."""
    return DeviceClock if torch.cuda.is_initialized() else HostClock


class _Recording:
    def __init__(self) -> None:
        self.timelines: list[Timeline] = []
        self._clock = clock()
        self._begin = self._clock.now()
        self._beside: list[tuple[Schedule, list[Instant]]] = []

    def add(self, schedule: Schedule, times: list[tuple[float, float]], began: Instant) -> None:
        """Ops of a schedule that has ended, in seconds since it began."""
        self.timelines.append(Timeline.of_times(schedule, times, self._clock.seconds(self._begin, began)))

    def add_beside(self, schedule: Schedule, instants: list[Instant]) -> None:
        """Ops one after another, which may not have ended on the device."""
        self._beside.append((schedule, instants))

    def settle(self) -> None:
        if not self._beside:
            return
        self._clock.settle()
        for schedule, (began, *ends) in self._beside:
            after = [0.0, *(self._clock.seconds(began, end) for end in ends)]
            self.add(schedule, list(pairwise(after)), began)


_recordings: list[_Recording] = []


@contextmanager
def recording() -> Iterator[list[Timeline]]:
    """Yields a list that gets the timeline of every schedule that runs inside the context, in order; and at its end,
    those that were begun in it to run beside them, as far as they have ended.
    """
    one = _Recording()
    _recordings.append(one)
    try:
        yield one.timelines
    finally:
        _recordings.remove(one)
        one.settle()


def is_recording() -> bool:
    """Whether anybody wants to know."""
    return bool(_recordings)


def note(schedule: Schedule, times: list[tuple[float, float]], began: Instant) -> None:
    """Tells those who record of a schedule that ran.

    Args:
        times: begin and end of each op in seconds since `began`, of `clock`.
    """
    for one in _recordings:
        one.add(schedule, times, began)


class Beside:
    """Ops that one lane runs one after another, beside all schedules: on another thread, or another stream.

    with Beside(...) as beside:  # in the lane
        ...  # the first op
        beside.ended()
        ...  # and so on
    """

    def __init__(self, schedule: Callable[[], Schedule]) -> None:
        """For those who record now, where the ops are begun.

        Args:
            schedule: makes the schedule, if somebody wants it; all its ops in one lane.
        """
        self._recordings = tuple(_recordings)
        self._schedule = schedule
        self._instants: list[Instant] = []

    def __enter__(self) -> Beside:
        self.ended()
        return self

    def ended(self) -> None:
        """The op that ran has ended."""
        if self._recordings:
            self._instants.append(clock().now())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for one in self._recordings:
                one.add_beside(self._schedule(), self._instants)
