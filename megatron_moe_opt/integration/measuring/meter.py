"""Times ops on all ranks, through the executor and the steps that training uses."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_moe_opt.integration.measuring.timing import slowest, timed
from megatron_moe_opt.planning.costs.cluster import Points
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule

# A measurement is so many runs of as many ops as fit into this time together; of long ops, one run of a few.
MEASURE_SECONDS = 0.4
RUNS = 3
LEAST_OPS, MOST_OPS = 4, 96
CALLS = 9
# A size that seems to take longer a byte than the one before is measured so many times more, and the least taken: a
# disturbed run can only be too long. Where it is longer by DIP, it is so even when the time is up: what takes too long
# uses the time up, so that otherwise the last point of a curve, from which larger sizes follow, would seldom be right.
# So is, in the end, what takes DIP longer than the straight line between its neighbours.
MORE_OF_OUTLIERS = 2
DIP = 0.1
# A curve of one point says nothing of larger sizes: the second size is measured even when the time is up, unless its
# ops would take longer than this together.
SECOND_SIZE_SECONDS = 1.0
# A size that takes less than FLAT times as long as the one before it shows what an op takes besides its bytes, as the
# sizes up to LEAP times as large would: these are passed over, so that the time reaches those where bytes count. From
# there the sizes in between are measured after all, the largest first, down to one that is flat.
FLAT = 1.25
LEAP = 8
MOST_PIPELINES = 16  # of a run: each has buffers of its own
MOST_BESIDE = 1000  # ops that keep another lane busy
# What these ops take alone, over what the lane beside them needs alone: the least of these with which they outlast it.
OUTLASTING = (1.5, 3.0, 6.0)


@dataclass(frozen=True)
class Sized:
    """An op with its buffers, to be issued any number of times."""

    size: int
    """The bytes as Op.size counts them (or rows), rounded to what the op can carry."""
    steps: Callable[[], Steps]


@dataclass(frozen=True)
class Load:
    """An op that can be made in any size, to be measured over it."""

    kind: Kind
    lane: Lane
    group: str | None
    sized: Callable[[int], Sized]
    is_whole: bool = False
    """Whether training does all of it in one op, so that large sizes matter, where the pace may be another one."""

    def __str__(self) -> str:
        return self.kind.value if self.group is None else f"{self.kind.value} {self.group}"


@dataclass(frozen=True)
class Busy:
    """An op that keeps its lane busy, and the seconds that it takes alone."""

    load: Load
    sized: Sized
    seconds: float


@dataclass(frozen=True)
class SizedPipeline:
    """A schedule, to be bound to buffers and run any number of times."""

    size: int
    """The bytes, rounded to what the schedule can carry."""
    bind: Callable[[], tuple[Schedule, Sequence[Steps]]]


S = TypeVar("S", Sized, SizedPipeline)


class Meter:
    """Measures ops on all ranks: every rank of the world calls the same methods with the same arguments, and gets the
    same answers.

    Ops of a run follow each other without a pause, as chunks in a pipeline do. A run lasts until the last rank is
    through: ranks share links, seldom fairly, and one that is slow now is fast when the others are done. Of runs the
    median is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.noise = 0.0
        """The noise of the last curve: how far a point lay above what was kept of it, after it was measured again."""
        self.ended_flat = False
        """Whether the last curve ended, for want of time, at a size that took about as long as the one before it."""
        self._executor = executor(device.type)
        self._start = time.perf_counter()

    def elapsed(self) -> float:
        """Returns the seconds since this meter was made, the slowest rank's."""
        return self._slowest([time.perf_counter() - self._start])[0]

    def curve(self, load: Load, sizes: Sequence[int], seconds: float, longest: float) -> Points:
        """Returns times over sizes, from the first on: as many as fit into `seconds`, up to an op that takes over
        `longest`.
        """

        def alone(sized: Sized, expected: float | None) -> float:
            return self._alone(load, sized, 1 if expected is None else _ops(expected))

        return self._points(load.sized, alone, sizes, seconds, longest, one_pace=not load.is_whole)

    def pipeline_curve(
        self, sized: Callable[[int], SizedPipeline], sizes: Sequence[int], seconds: float, longest: float
    ) -> Points:
        """Returns, as `curve`, times of a schedule as a whole: a run is the schedule several times, one after the
        other.
        """

        def alone(pipeline: SizedPipeline, expected: float | None) -> float:
            times = 1 if expected is None else min(_ops(expected), MOST_PIPELINES)
            return statistics.median(self._pipeline_seconds(pipeline, times) for _ in range(_runs(times)))

        return self._points(sized, alone, sizes, seconds, longest)

    def _points(
        self,
        sized_for: Callable[[int], S],
        time_of: Callable[[S, float | None], float],
        sizes: Sequence[int],
        seconds: float,
        longest: float,
        one_pace: bool = True,
    ) -> Points:
        """Returns the points of a curve. `time_of` measures a size, given how long it is expected to take; first of
        all it is given None: once to warm up, which makes communicators and loads kernels and is not of the `seconds`,
        and once to know what to expect.
        """
        points: list[tuple[int, float]] = []
        self.ended_flat = False
        first = sized_for(sizes[0])
        time_of(first, None)
        end = self.elapsed() + seconds
        at_first = time_of(first, None)
        passed_over: list[int] = []
        for size in sizes:
            may_leap = _is_flat(points) and LEAP * points[-1][1] < longest
            if may_leap and size < LEAP * points[-1][0] and size != sizes[-1]:
                passed_over.append(size)
                continue
            sized = sized_for(size) if points else first
            if points and sized.size <= points[-1][0]:
                continue  # rounded up to the size before
            expected = points[-1][1] * sized.size / points[-1][0] if points else at_first
            may_be_late = len(points) == 1 and expected * LEAST_OPS <= SECOND_SIZE_SECONDS
            if points and not may_be_late and self.elapsed() + expected * LEAST_OPS > end:
                self.ended_flat = _is_flat(points)
                break
            took = time_of(sized, expected)
            for _ in range(MORE_OF_OUTLIERS):
                is_dip = took * (1 - DIP) > expected
                if points and took > expected and (is_dip or self.elapsed() + took * LEAST_OPS < end):
                    took = min(took, time_of(sized, expected))
            points.append((sized.size, took))
            # Bytes begin to count somewhere in a leap, and a straight line over all of it would not show where.
            landed = len(points) - 1
            while passed_over and not _is_flat(points[: landed + 1]) and self.elapsed() + took * LEAST_OPS < end:
                between = sized_for(passed_over.pop())
                if points[landed - 1][0] < between.size < points[landed][0]:
                    points.insert(landed, (between.size, time_of(between, points[landed][1])))
            passed_over.clear()
            if took > longest:
                break
        for index in range(1, len(points) - 1):
            size, took = points[index]
            if took * (1 - DIP) > _between(points, index):
                sized = sized_for(size)
                again = (time_of(sized, took) for _ in range(MORE_OF_OUTLIERS))
                points[index] = size, min(took, *again)
        kept = _without_dips(points, one_pace)
        self.noise = max(took / least - 1 for (_, took), (_, least) in zip(points, kept, strict=False))
        return kept

    def rates_beside(self, busy: Busy, *neighbours: Sequence[Busy], hurried: bool = False) -> list[float]:
        """Returns how much of its own pace an op keeps while other lanes are busy, in (0, 1].

        Args:
            neighbours: one answer for each: what keeps other lanes busy, all at once.
            hurried: with the fewest ops.
        """
        ops = LEAST_OPS if hurried else _ops(busy.seconds)
        alone = self._alone(busy.load, busy.sized, ops)
        return [min(1.0, alone / self._beside(busy, ops, alone, others)) for others in neighbours]

    def calls(self, functions: Sequence[Callable[[], None]], seconds: float = math.inf) -> list[float]:
        """Returns the seconds of each function on the slowest rank, the median of several calls in turn.

        Args:
            seconds: after which no further turn begins; there are two at least.
        """
        end = self.elapsed() + seconds
        took: list[list[float]] = [[] for _ in functions]
        for turn in range(CALLS + 1):  # the first warms up
            if turn > 1 and self.elapsed() > end:
                break
            for function, of_function in zip(functions, took, strict=True):
                dist.barrier()
                of_function.append(timed(function, self.device))
        return [statistics.median(self._slowest(of_function[1:])) for of_function in took]

    def _pipeline_seconds(self, pipeline: SizedPipeline, times: int) -> float:
        """Returns seconds of a schedule that begins, each time, when the last op of the time before has finished."""
        ops: list[Op] = []
        steps: list[Steps] = []
        for _ in range(times):
            schedule, bound = pipeline.bind()
            first = len(ops)
            after = (first - 1,) if first else ()
            ops += [
                replace(op, waits_for=tuple(first + other for other in op.waits_for) or after) for op in schedule.ops
            ]  # fmt: skip
            steps += bound
        dist.barrier()
        timeline = self._executor.run(Schedule("profile", tuple(ops)), steps, record=True)
        assert timeline is not None
        return self._slowest([timeline.seconds])[0] / times

    def _alone(self, load: Load, sized: Sized, ops: int) -> float:
        return statistics.median(self._op_seconds((load, sized, ops))[0] for _ in range(_runs(ops)))

    def _beside(self, busy: Busy, ops: int, alone: float, others: Sequence[Busy]) -> float:
        """Returns the seconds of one of `ops` ops that take `alone` alone, while all others are busy from its start to
        its end.
        """
        seconds: list[float] = []
        factors = iter(OUTLASTING)
        factor = next(factors)
        while len(seconds) < _runs(ops):
            counts = [1 + min(MOST_BESIDE, math.ceil(factor * alone * ops / other.seconds)) for other in others]
            queues = [(other.load, other.sized, count) for other, count in zip(others, counts, strict=True)]
            took, idle = self._op_seconds((busy.load, busy.sized, ops), *queues)
            longer = next(factors, None) if idle else None
            if longer is None:
                seconds.append(took)
            else:
                factor = longer
        return statistics.median(seconds)

    def _op_seconds(self, *queues: tuple[Load, Sized, int]) -> tuple[float, float]:
        """Returns the seconds of an op of the first queue, while the others run too; and for how long, before the first
        ended, one of the others had no ops left.
        """
        lanes = [
            [(Op(load.kind, load.lane, chunk, sized.size, group=load.group), sized.steps) for chunk in range(count)]
            for load, sized, count in queues
        ]
        issued = [entry for entry in chain.from_iterable(zip_longest(*lanes)) if entry is not None]
        steps = [make() for _, make in issued]
        dist.barrier()
        timeline = self._executor.run(Schedule("profile", tuple(op for op, _ in issued)), steps, record=True)
        assert timeline is not None
        ends = [timeline.lane(load.lane)[-1].end for load, _, _ in queues]
        took, idle = self._slowest([ends[0], ends[0] - min(ends)])
        return took / queues[0][2], idle

    def _slowest(self, seconds: list[float]) -> list[float]:
        return slowest(seconds, self.device)


def _without_dips(points: Sequence[tuple[int, float]], one_pace: bool = True) -> Points:
    """Returns the points without dips: a size that moves fewer bytes a second than both its neighbours, by DIP or more,
    gets the time between theirs. A smaller size takes no more time than a larger one. Links are not slow at a single
    size, measurements are.

    The last size has no second neighbour. With `one_pace` it is left out where it is slower than the one before by so
    much, which is not slower than its own: all larger sizes would inherit what may be a disturbance.
    """
    smooth = list(points)
    if one_pace and len(points) > 2 and _is_slower(points[-1], points[-2]) and not _is_slower(points[-2], points[-3]):
        smooth.pop()
    for index in range(1, len(points) - 1):
        if _is_slower(points[index], points[index - 1]) and _is_slower(points[index], points[index + 1]):
            smooth[index] = points[index][0], _between(points, index)
    least = math.inf
    for index, (size, seconds) in reversed(list(enumerate(smooth))):
        least = min(least, seconds)
        smooth[index] = size, least
    return tuple(smooth)


def _is_flat(points: Sequence[tuple[int, float]]) -> bool:
    """Whether the last size took about as long as the one before it."""
    return len(points) > 1 and points[-1][1] < FLAT * points[-2][1]


def _between(points: Sequence[tuple[int, float]], index: int) -> float:
    """Returns the seconds of a size on the straight line between its neighbours."""
    (left, left_seconds), (size, _), (right, right_seconds) = points[index - 1 : index + 2]
    return left_seconds + (right_seconds - left_seconds) * (size - left) / (right - left)


def _is_slower(point: tuple[int, float], neighbour: tuple[int, float]) -> bool:
    """Whether a point moves fewer bytes a second than its neighbour, by DIP or more."""
    (size, seconds), (other, other_seconds) = point, neighbour
    return size / seconds < (1 - DIP) * other / other_seconds


def _runs(ops: int) -> int:
    """Returns how many runs to make of so many ops: of a few long ones, one."""
    return RUNS if ops > LEAST_OPS else 1


def _ops(seconds: float) -> int:
    """Returns how many ops to put into a run, if one takes so long."""
    return max(LEAST_OPS, min(MOST_OPS, int(MEASURE_SECONDS / RUNS / seconds)))
