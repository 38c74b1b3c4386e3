"""How long each schedule takes in virtual time, with a hardware queue a stream and with one for all.

python -m tests.accelerator.makespans      # the table of docs/streams.md
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from megatron_moe_opt.schedules.issue_order import SECONDS
from megatron_moe_opt.schedules.schedule import Lane, Op, Schedule
from tests.accelerator.all_schedules import COUNTS, all_schedules
from tests.accelerator.executor_library import SoftwareExecutor, Work, build
from tests.accelerator.software import Device, Queues, play

LANES = tuple(lane for lane in Lane if lane is not Lane.EXPERTS)


def nominal(op: Op) -> float:
    """What `in_issue_order` takes an op for: a collective 1, a copy 0.1, experts 2."""
    return SECONDS.get(op.kind, 1.0)


def caller_lane(schedule: Schedule) -> int:
    """As Executor has it on CUDA."""
    return LANES.index(Lane.COMPUTE) if Lane.COMPUTE in schedule.lanes else -1


def makespan(executor: SoftwareExecutor, schedule: Schedule, cost: Callable[[Op], float], queues: Queues) -> float:
    """From the first op's begin to the moment at which the caller's stream goes on."""
    device = Device(queues)
    ops = [
        (LANES.index(op.lane), op.waits_for, [lambda op=op: Work(seconds=cost(op), group=op.group)])
        for op in schedule.ops
    ]
    executor.issue(device, ops, caller_lane(schedule))
    return max(end for _, end in play(device).values())


def table(executor: SoftwareExecutor) -> str:
    """One queue / many queues, of every schedule in each number of chunks."""
    families: dict[str, dict[int, str]] = {}
    for name, schedule in all_schedules():
        family, _, rest = name.partition(", ")
        count, _, groups = rest.partition(", ")
        times = [makespan(executor, schedule, nominal, queues) for queues in (Queues.ONE, Queues.MANY)]
        of = families.setdefault(", ".join(filter(None, (family, groups))), {})
        of[int(count.split()[0]) if count else 1] = " / ".join(f"{seconds:.1f}" for seconds in times)
    lines = [f"| schedule | {' | '.join(map(str, COUNTS))} |", "|---" * (1 + len(COUNTS)) + "|"]
    for family in sorted(families):
        lines.append(f"| {family} | {' | '.join(families[family].get(count, '') for count in COUNTS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(table(SoftwareExecutor(build(Path(folder)), len(LANES))))
