"""The order in which ops are issued, for GPUs on which streams share one hardware queue.

Megatron sets CUDA_DEVICE_MAX_CONNECTIONS=1 where its tensor or context parallelism relies on launch order. Then an op
that waits holds up all that is issued after it, in whichever lane: nothing should stand behind an op that starts later
than itself. When ops start depends on how long they take. All ranks must issue alike, or two of them could wait for
each other in two process groups: so what an op takes is a guess by its kind and lane, whatever this rank's bytes. There
are several guesses, and the order is one that is good with each of them.

Experts are several kernels, each of which waits for the one before it and holds up what was issued behind it. So they
are issued in two halves, and what can begin halfway through them is issued in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from megatron_moe_opt.schedules.schedule import OF_EXPERTS, Kind, Lane, Op

SECONDS = {
    Kind.PERMUTE: 0.1,
    Kind.COPY: 0.1,
    Kind.SUM: 0.1,
    Kind.ACTIVATE: 0.1,
    Kind.COMPUTE: 2.0,
    Kind.GRADIENT: 4.0,
    Kind.SHARED: 0.5,
    Kind.SHARED_GRADIENT: 1.0,
}
"""The time that ops of a kind take, against a collective's 1: the first guess."""
_INSIDE_NODES, _COPIES, _EXPERTS, _HOST_COPIES = (0.25, 1.0), (0.02, 0.3), (0.25, 5.0), (0.25, 2.0)
"""The times, against those of a collective between nodes, that the other guesses have: little and much of each."""
EXPERT_KERNELS = 4
"""The kernels that experts of one partition are taken for. What is issued behind some can begin when the last of them
does.
"""
HELD = 1 - 2 / EXPERT_KERNELS
"""The part of a half's time for which it holds up what is issued behind it."""
_FIRST_COUNTS = 1.2
"""How much worse the other guesses may come out than the first."""
_SQUARINGS = 5
"""The number of times that weights are squared: by its 32nd power the worst guess outweighs the others."""

_Shape = tuple[Lane, Kind, tuple[int, ...]]
"""What decides the order of an op: its lane, its kind and what it waits for."""
_Times = npt.NDArray[np.float64]
"""The time that each op takes by each guess, [ops, guesses]."""


def in_issue_order(ops: Sequence[Op]) -> tuple[list[int], tuple[Op, ...]]:
    """Returns indexes of ops in an order that holds up few of them on one queue, in which those of a lane keep theirs;
    and the ops in that order, with what each leaves room for halfway.

    Args:
        ops: each after those it waits for.
    """
    halves = _order(tuple((op.lane, op.kind, op.waits_for) for op in ops))
    order = list(dict.fromkeys(halves))
    place = {index: number for number, index in enumerate(order)}
    ends = {index: number for number, index in enumerate(halves)}
    ordered = [
        replace(
            ops[index],
            waits_for=tuple(place[other] for other in ops[index].waits_for),
            meanwhile=max(ends[index] - halves.index(index) - 1, 0),
        )
        for index in order
    ]
    return order, tuple(ordered)


@lru_cache(maxsize=1024)
def _order(ops: tuple[_Shape, ...]) -> tuple[int, ...]:
    """Returns the order that takes, one after another, the op or half of one after which the whole would end soonest,
    by the guess that it suits least above all. What is issued in halves is in it twice.

    Nothing begins before what was issued before it, nor before the last kernel of that. So once an op is issued, the
    next ops of all lanes begin no sooner, and the whole ends no sooner than what comes after each takes. What is
    computed is rounded alike on every machine (products, quotients, exact sums), so that all ranks come to the same
    order.
    """
    if not ops:
        return ()
    ops, whose = _with_halves(ops)
    seconds = np.array([_guesses(lane, kind) for lane, kind, _ in ops])
    halves = np.array([[kind in OF_EXPERTS] for _, kind, _ in ops])
    seconds = np.where(halves, seconds / 2, seconds)
    held = np.where(halves, HELD * seconds, 0.0)
    starts, left = _on_many_queues(ops, seconds)
    whole = (starts + left).max(axis=0)
    weights = np.ones(len(whole))
    weights[0] = _FIRST_COUNTS
    of_lanes: dict[Lane, list[int]] = {}
    for index in reversed(range(len(ops))):
        of_lanes.setdefault(ops[index][0], []).append(index)  # the next op of a lane is the last of its list
    order: list[int] = []
    issued: set[int] = set()
    for _ in ops:
        following = [indexes[-1] for indexes in of_lanes.values() if indexes]
        for index in following:
            for other in ops[index][2]:
                starts[index] = np.maximum(starts[index], starts[other] + seconds[other])
        begun = starts[order[-1]] + held[order[-1]] if order else np.zeros_like(whole)

        def regret(index: int, begun: _Times = begun, following: Sequence[int] = following) -> tuple[float, float]:
            begins = np.maximum(begun, starts[index])
            ends = np.maximum(begins + held[index], starts[following]) + left[following]
            ends[following.index(index)] = begins + left[index]
            longer = weights * (ends.max(axis=0) / whole)
            for _ in range(_SQUARINGS):
                longer = longer * longer
            return math.fsum(longer), starts[index][0]

        best = min((index for index in following if issued.issuperset(ops[index][2])), key=regret)
        starts[best] = np.maximum(starts[best], begun)
        order.append(best)
        issued.add(best)
        lane = of_lanes[ops[best][0]]
        lane.pop()
        if lane:
            starts[lane[-1]] = np.maximum(starts[lane[-1]], starts[best] + seconds[best])
    return tuple(whose[one] for one in order)


def _with_halves(ops: Sequence[_Shape]) -> tuple[list[_Shape], list[int]]:
    """Returns the ops, two in the place of each that is issued in halves, and of each the index that it had."""
    halved: list[_Shape] = []
    whose: list[int] = []
    last: list[int] = []
    for index, (lane, kind, waits_for) in enumerate(ops):
        halved.append((lane, kind, tuple(last[other] for other in waits_for)))
        whose.append(index)
        if kind in OF_EXPERTS:
            halved.append((lane, kind, (len(halved) - 1,)))
            whose.append(index)
        last.append(len(halved) - 1)
    return halved, whose


@lru_cache
def _guesses(lane: Lane, kind: Kind) -> tuple[float, ...]:
    """Returns the time that an op takes by each guess, in units of a collective between nodes."""
    guesses = [SECONDS.get(kind, 1.0)]
    for inside, copy, experts, host in product(_INSIDE_NODES, _COPIES, _EXPERTS, _HOST_COPIES):
        of_kind = dict.fromkeys((Kind.PERMUTE, Kind.COPY, Kind.SUM, Kind.ACTIVATE), copy)
        of_kind |= {Kind.COMPUTE: experts, Kind.GRADIENT: 2 * experts, Kind.OFFLOAD: host, Kind.PREFETCH: host}
        of_kind |= {Kind.SHARED: experts / 4, Kind.SHARED_GRADIENT: experts / 2}
        guesses.append(of_kind.get(kind, inside if lane is Lane.INTRA else 1.0))
    return tuple(guesses)


def _on_many_queues(ops: Sequence[_Shape], seconds: _Times) -> tuple[_Times, _Times]:
    """Returns when each op starts where nothing holds it up but its lane and what it waits for; and from then on the
    time to the end of the last op that comes after it.
    """
    starts, left = np.zeros_like(seconds), seconds.copy()
    last: dict[Lane, int] = {}
    behind: list[set[int]] = []
    for index, (lane, _, waits_for) in enumerate(ops):
        behind.append({*waits_for, *([last[lane]] if lane in last else [])})
        last[lane] = index
        for other in behind[-1]:
            starts[index] = np.maximum(starts[index], starts[other] + seconds[other])
    for index in reversed(range(len(ops))):
        for other in behind[index]:
            left[other] = np.maximum(left[other], seconds[other] + left[index])
    return starts, left
