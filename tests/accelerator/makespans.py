"""How long each schedule takes in virtual time, with a hardware queue a stream and with one for all, and how much of it
overlaps.

python -m tests.accelerator.makespans      # the table of docs/streams.md, and how much longer one queue takes
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from megatron_moe_opt.schedules.issue_order import EXPERT_KERNELS, SECONDS, _guesses
from megatron_moe_opt.schedules.schedule import OF_EXPERTS, Kind, Lane, Op, Schedule
from tests.accelerator.all_schedules import COUNTS, all_schedules
from tests.accelerator.executor_library import SoftwareExecutor, Work, build
from tests.accelerator.software import Device, Entry, Queues, play

LANES = tuple(lane for lane in Lane if lane is not Lane.EXPERTS)


def nominal(op: Op) -> float:
    """Returns what the order of issue takes an op for: a collective 1, a copy 0.1, experts 2."""
    return SECONDS.get(op.kind, 1.0)


def kernels(op: Op) -> int:
    """Returns the kernels of an op, one behind the other on its stream."""
    return EXPERT_KERNELS if op.kind in OF_EXPERTS else 1


def caller_lane(schedule: Schedule) -> int:
    """Returns the lane of the caller as Executor has it on CUDA."""
    return LANES.index(Lane.COMPUTE) if Lane.COMPUTE in schedule.lanes else -1


Times = Mapping[Entry, tuple[float, float]]
"""Begin and end of all that is launched. The label of what an op does is its lane."""


def makespan(executor: SoftwareExecutor, schedule: Schedule, cost: Callable[[Op], float], queues: Queues) -> float:
    """Returns the time from the first op's begin to the moment at which the caller's stream goes on."""
    return _length(_played(executor, schedule, cost, queues))


def nominal_makespan(executor: SoftwareExecutor, name: str, queues: Queues) -> float:
    """Returns the makespan of one of `all_schedules` by `nominal`, played once."""
    return _length(_nominal(executor, name, queues))


def overlap(executor: SoftwareExecutor, name: str, queues: Queues) -> float:
    """Returns the part of the time in which lanes are busy, added over all lanes, that lies beside an op of another
    lane, of one of `all_schedules` by `nominal`.
    """
    times = _nominal(executor, name, queues)
    busy = [(entry.label, begin, end) for entry, (begin, end) in times.items() if begin < end]
    moments = sorted({moment for _, *span in busy for moment in span})
    total = beside = 0.0
    for begin, end in pairwise(moments):
        lanes = len({lane for lane, first, last in busy if first <= begin and end <= last})
        total += lanes * (end - begin)
        beside += (end - begin) * (lanes if lanes > 1 else 0)
    return beside / total


def _length(times: Times) -> float:
    return max(end for _, end in times.values())


@cache
def _nominal(executor: SoftwareExecutor, name: str, queues: Queues) -> Times:
    return _played(executor, all_schedules()[name], nominal, queues)


def _played(executor: SoftwareExecutor, schedule: Schedule, cost: Callable[[Op], float], queues: Queues) -> Times:
    device = Device(queues)

    def kernel(op: Op, number: int) -> Work:
        if 2 * number == kernels(op):
            executor.issue_meanwhile()
        return Work(seconds=cost(op) / kernels(op), group=op.group, label=op.lane.value)

    ops = [
        (
            LANES.index(op.lane),
            op.waits_for,
            [partial(kernel, op, number) for number in range(kernels(op))],
            op.meanwhile,
        )
        for op in schedule.ops
    ]
    executor.issue(device, ops, caller_lane(schedule))
    return play(device)


def table(executor: SoftwareExecutor) -> str:
    """One queue / many queues of every schedule in each number of chunks, and its overlap with many."""
    families: dict[str, dict[int, str]] = {}
    for name in all_schedules():
        family, _, rest = name.partition(", ")
        count, _, groups = rest.partition(", ")
        times = [nominal_makespan(executor, name, queues) for queues in (Queues.ONE, Queues.MANY)]
        of = families.setdefault(", ".join(filter(None, (family, groups))), {})
        beside = overlap(executor, name, Queues.MANY)
        of[int(count.split()[0]) if count else 1] = f"{times[0]:.1f} / {times[1]:.1f}, {beside:.0%}"
    lines = [f"| schedule | {' | '.join(map(str, COUNTS))} |", "|---" * (1 + len(COUNTS)) + "|"]
    for family in sorted(families):
        lines.append(f"| {family} | {' | '.join(families[family].get(count, '') for count in COUNTS)} |")
    return "\n".join(lines)


def guess(number: int, op: Op) -> float:
    """Returns one of the guesses that the order of issue makes of what an op takes."""
    return list(_guesses(op.lane, op.kind))[number]


def longer(executor: SoftwareExecutor) -> str:
    """Returns how many times as long one queue takes as many, by the guesses that the order of issue is made for."""
    schedules = [*all_schedules().values()]
    of_guesses = []
    for cost in (partial(guess, number) for number, _ in enumerate(_guesses(Lane.COPY, Kind.COPY))):
        seconds = [[makespan(executor, one, cost, queues) for one in schedules] for queues in (Queues.ONE, Queues.MANY)]
        of_guesses.append([one / many for one, many in zip(*seconds, strict=True)])
    first, *others = of_guesses
    whole = [replace(one, ops=tuple(replace(op, meanwhile=0) for op in one.ops)) for one in schedules]
    untold = [
        makespan(executor, one, nominal, Queues.ONE) / makespan(executor, one, nominal, Queues.MANY) for one in whole
    ]
    lines = []
    by = {"the first guess": first, "the others": sum(others, []), "the first, of experts without a middle": untold}
    for name, ratios in by.items():
        slower, above = sum(ratio > 1 + 1e-9 for ratio in ratios), sum(ratio > 1.15 for ratio in ratios)
        spread = f"{fmean(ratios):.4f} times as long in the mean, {max(ratios):.3f} at most, over 1.15 in {above}"
        lines.append(f"by {name}: of {len(ratios)} cases {slower} take longer; {spread}")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        of_tests = SoftwareExecutor(build(Path(folder)), len(LANES))
        print(f"{table(of_tests)}\n\n{longer(of_tests)}")
