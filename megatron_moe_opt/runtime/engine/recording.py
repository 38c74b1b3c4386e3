"""When ops ran, for whoever wants to see it: those of schedules, and those that run beside all schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from megatron_moe_opt.runtime.observed.layer_pass import DeviceClock, HostClock, Instant
from megatron_moe_opt.schedules.schedule import Schedule
from megatron_moe_opt.schedules.timeline import Timeline


def clock() -> type[HostClock] | type[DeviceClock]:
    """Returns the clock to measure with: the device's where a CUDA device is in use, else the host's."""
    return DeviceClock if torch.cuda.is_initialized() else HostClock


class _Recording:
    def __init__(self) -> None:
        self.timelines: list[Timeline] = []
        self._clock = clock()
        self._begin = self._clock.now()
        self._beside: list[tuple[Schedule, Instant, Callable[[], list[tuple[float, float]]]]] = []

    def add(self, schedule: Schedule, times: list[tuple[float, float]], began: Instant) -> None:
        """Records the ops of a schedule that has ended; `times` are in seconds since it began."""
        self.timelines.append(Timeline.of_times(schedule, times, self._clock.seconds(self._begin, began)))

    def add_beside(self, schedule: Schedule, began: Instant, times: Callable[[], list[tuple[float, float]]]) -> None:
        """Records ops that may not have ended on the device: their times are asked for when the recording ends."""
        self._beside.append((schedule, began, times))

    def settle(self) -> None:
        if not self._beside:
            return
        self._clock.settle()
        for schedule, began, times in self._beside:
            self.add(schedule, times(), began)


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
    """Says whether a recording is under way."""
    return bool(_recordings)


def note(schedule: Schedule, times: list[tuple[float, float]], began: Instant) -> None:
    """Tells all recordings under way of a schedule that ran.

    Args:
        times: begin and end of each op in seconds since `began`, of `clock`.
    """
    for one in _recordings:
        one.add(schedule, times, began)


class Beside:
    """Keeps the recordings that are under way when a schedule is started, to tell them of it when it has run."""

    def __init__(self) -> None:
        self._recordings = tuple(_recordings)

    def __bool__(self) -> bool:
        return bool(self._recordings)

    def note(self, schedule: Schedule, began: Instant, times: Callable[[], list[tuple[float, float]]]) -> None:
        """Tells them of a schedule that has run, or is issued. Args: times: begin and end of each op in seconds
        since `began`, of `clock`.
        """
        for one in self._recordings:
            one.add_beside(schedule, began, times)

    def note_instants(self, schedule: Schedule, instants: list[Instant]) -> None:
        """Tells them of a schedule that is issued. Args: instants: when the first op began, and each one ended, the
        next one beginning then.
        """

        def times() -> list[tuple[float, float]]:
            return list(pairwise(clock().seconds(instants[0], instant) for instant in instants))

        self.note(schedule, instants[0], times)
