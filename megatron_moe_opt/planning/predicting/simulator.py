"""Plays a schedule on its lanes: the prediction of what the executor will do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from megatron_moe_opt.planning.costs.curves import Slowdown
from megatron_moe_opt.schedules.issue_order import HELD
from megatron_moe_opt.schedules.schedule import OF_EXPERTS, Lane, Op, Order, Schedule
from megatron_moe_opt.schedules.timeline import Timeline


def simulate(
    schedule: Schedule, cost: Callable[[Op], float], slowdown: Slowdown | None = None, one_queue: bool = False
) -> Timeline:
    """Returns when each op of a schedule starts and ends: as soon as its lane is free and what it waits for is done.

    Args:
        cost: seconds of an op that runs alone, such as `Costs`.
        slowdown: with it an op progresses at the `lane_rate` beside all lanes that are busy, which changes whenever an
            op starts or ends.
        one_queue: whether the lanes share one hardware queue of a GPU, on which an op starts no sooner than the last
            kernel of what was issued before it (schedules/issue_order.py). Experts are issued in halves.

    Raises:
        ScheduleError: an op waits for one that does not come before it.
        ValueError: a factor outside (0, 1].
    """
    order = schedule.order
    seconds = [cost(op) for op in schedule.ops]
    if one_queue:
        halved = tuple(op.meanwhile if op.kind in OF_EXPERTS else None for op in schedule.ops)
        return Timeline.of_times(schedule, _play_in_turn(order, seconds, halved, slowdown))
    return Timeline.of_times(schedule, play(order, seconds, slowdown))


def play(order: Order, seconds: Sequence[float], slowdown: Slowdown | None = None) -> list[tuple[float, float]]:
    """Returns start and end of each op, given how long each takes alone. See `simulate`."""
    return _play_disturbed(order, seconds, slowdown) if slowdown else _play_undisturbed(order, seconds)


def _play_in_turn(
    order: Order, seconds: Sequence[float], halved: tuple[int | None, ...], slowdown: Slowdown | None
) -> list[tuple[float, float]]:
    """Plays ops that start in turn.

    Args:
        halved: of an op in halves, the ops that are issued between them; None: it is one kernel.
    """
    pieces = _in_pieces(order, halved)
    times = play(
        pieces.order, [part * seconds[op] for op, part in zip(pieces.op_of, pieces.part, strict=True)], slowdown
    )
    return [(times[begin][0], times[end][1]) for begin, end in zip(pieces.first, pieces.last, strict=True)]


class _Pieces(NamedTuple):
    """Ops that start in turn as pieces that do: each half of one is two, up to its last kernel, and that."""

    order: Order
    op_of: tuple[int, ...]
    """The op of each piece."""
    part: tuple[float, ...]
    """The part of its op's time that each piece takes."""
    first: tuple[int, ...]
    """The first piece of each op."""
    last: tuple[int, ...]


@lru_cache(maxsize=1024)
def _in_pieces(order: Order, halved: tuple[int | None, ...]) -> _Pieces:
    half = HELD / 2, (1 - HELD) / 2
    pieces: list[tuple[int, float]] = []
    ends: dict[int, int] = {}  # the op whose second half comes behind an op
    for op, meanwhile in enumerate(halved):
        if meanwhile is None:
            pieces.append((op, 1.0))
        else:
            pieces += [(op, part) for part in half]
            ends[op + meanwhile] = op
        if op in ends:
            pieces += [(ends[op], part) for part in half]
    op_of, parts = zip(*pieces, strict=True) if pieces else ((), ())
    last = {op: piece for piece, op in enumerate(op_of)}
    first = {op: piece for piece, op in reversed(list(enumerate(op_of)))}
    waits_for = [
        tuple(last[other] for other in order.waits_for[op]) if piece == first[op] else ()
        for piece, op in enumerate(op_of)
    ]
    of_pieces = Order(order.lanes, tuple(order.lane_of[op] for op in op_of), tuple(waits_for), in_turn=True)
    ops = range(len(halved))
    return _Pieces(of_pieces, op_of, parts, tuple(first[op] for op in ops), tuple(last[op] for op in ops))


def _play_undisturbed(order: Order, seconds: Sequence[float]) -> list[tuple[float, float]]:
    times: list[tuple[float, float]] = []
    free = [0.0] * len(order.lanes)
    head = 0.0
    for lane, waits_for, duration in zip(order.lane_of, order.waits_for, seconds, strict=True):
        start = free[lane]
        for other in waits_for:
            if times[other][1] > start:
                start = times[other][1]
        if order.in_turn:
            start = head = max(start, head)
        free[lane] = start + duration
        times.append((start, free[lane]))
    return times


def _play_disturbed(order: Order, seconds: Sequence[float], slowdown: Slowdown) -> list[tuple[float, float]]:
    """Plays a schedule whose lanes disturb each other: between two events every running op
    progresses at a constant rate.
    """
    rates_of = _rates(tuple(slowdown.items()))
    queues: list[list[int]] = [[] for _ in order.lanes]
    for index in reversed(range(len(order.lane_of))):
        queues[order.lane_of[index]].append(index)  # the next op of a lane is the last of its list
    starts, ends = [0.0] * len(seconds), [-1.0] * len(seconds)
    left: dict[int, float] = {}  # by lane: the work, in seconds, that its running op has left
    rates: dict[tuple[int, ...], list[float]] = {}
    now, unfinished, head = 0.0, len(seconds), 0
    while unfinished:
        starting = True
        while starting:
            starting = False
            for lane, queue in enumerate(queues):
                if queue and lane not in left:
                    following = queue[-1]
                    if order.in_turn and following != head:
                        continue
                    for other in order.waits_for[following]:
                        if ends[other] < 0:
                            break
                    else:
                        starts[following], left[lane] = now, seconds[following]
                        head += 1
                        starting = order.in_turn  # the next one may be of any lane
        running = tuple(left)
        if running not in rates:
            rates[running] = rates_of(tuple([order.lanes[lane] for lane in running]))
        paces = rates[running]
        step = min([work / pace for work, pace in zip(left.values(), paces, strict=True)])
        now += step
        for lane, pace in zip(running, paces, strict=True):
            work = left[lane] - step * pace
            if work > 1e-12 * abs(seconds[queues[lane][-1]]):  # rounding must not leave a rest that never ends
                left[lane] = work
            else:
                ends[queues[lane].pop()] = now
                del left[lane]
                unfinished -= 1
    return list(zip(starts, ends, strict=True))


@lru_cache(maxsize=64)
def _rates(factors: tuple[tuple[tuple[Lane, ...], float], ...]) -> Callable[[tuple[Lane, ...]], list[float]]:
    """Returns the function that gives the rates of ops in these lanes at once, and remembers them: a planner asks again
    and again. Raises ValueError as `simulate`.
    """
    slowdown = dict(factors)
    for (lane, *beside), factor in factors:
        if not 0 < factor <= 1:
            others = " and ".join(other.value for other in beside)
            raise ValueError(f"slowdown of lane {lane.value} beside {others} is {factor}, not in (0, 1]")

    @cache
    def of(running: tuple[Lane, ...]) -> list[float]:
        return [lane_rate(lane, [other for other in running if other is not lane], slowdown) for lane in running]

    return of


def lane_rate(lane: Lane, beside: Sequence[Lane], slowdown: Slowdown) -> float:
    """Returns the rate of an op in `lane` while all lanes of `beside` are busy.

    What was measured beside the most of these lanes at once counts, times the factors of the others one by one; of
    what was not measured the factor is 1. Two lanes that would take longer side by side than one after the other are
    taken to share what they compete for, in the proportion of their rates: a profile has the slowest rank's of each,
    and where ranks share processors that is another rank's.
    """
    busy = set(beside)
    most: tuple[Lane, ...] = ()
    for key in slowdown:
        if key[0] is lane and len(key) > 2 and len(key) > len(most) and busy.issuperset(key[1:]):
            most = key
    single = [_rate_beside(lane, other, slowdown) for other in beside if other not in most[1:]]
    return slowdown.get(most, 1.0) * math.prod(single)


def _rate_beside(lane: Lane, other: Lane, slowdown: Slowdown) -> float:
    rate = slowdown.get((lane, other), 1.0)
    return rate / min(1.0, rate + slowdown.get((other, lane), 1.0))
