"""The stream executor on streams in software: results under adversaries, what is recorded, failures, and mutants."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.schedule import Op, Schedule
from tests.accelerator.all_schedules import all_schedules
from tests.accelerator.executor_library import Refused, SoftwareExecutor, Work, build
from tests.accelerator.makespans import LANES, caller_lane
from tests.accelerator.mutants import mutants
from tests.accelerator.sanitizer import races
from tests.accelerator.software import CALLER, Adversary, Device, Queues, Stuck
from tests.multirank.test_executor import random_schedule

SCHEDULES = all_schedules()


class Values:
    """Buffers of a schedule as numbers: what an op writes tells which op it was and what it has read."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.schedule, self.ran = schedule, 0
        self.now: dict[str, object] = {}
        chooser = random.Random(seed)
        # Of an op: how often it does the same. An exchange may be followed by what needs it, in one op.
        self.actions = [chooser.choice((1, 1, 2)) for _ in schedule.ops]

    def begin(self) -> None:
        self.now.update(dict.fromkeys(self.schedule.inputs, "given"))

    def run(self, index: int, action: int) -> None:
        op = self.schedule.ops[index]
        read = [self.now.get(name) for name in (*op.reads, *(op.writes if action else ()))]
        self.now.update(dict.fromkeys(op.writes, hash((index, action, *read))))
        self.ran += 1

    def expected(self) -> tuple[int, dict[str, object]]:
        self.begin()
        for index, count in enumerate(self.actions):
            for action in range(count):
                self.run(index, action)
        return self.ran, dict(self.now)


def work(op: Op, seconds: float = 0.0, **fields: object) -> Work:
    return Work(seconds=seconds, label=str(op), **fields)


def ops_of(executor: SoftwareExecutor, schedule: Schedule, values: Values) -> list:
    def action(index: int, number: int) -> Work:
        op = schedule.ops[index]
        if (index + number) % 2:  # halfway through an op of two, at the begin of others, or not at all
            executor.issue_meanwhile()
        return work(op, run=lambda: values.run(index, number), group=op.group if number == 0 else None)

    return [
        (
            LANES.index(op.lane),
            op.waits_for,
            [lambda i=i, n=n: action(i, n) for n in range(values.actions[i])],
            op.meanwhile,
        )
        for i, op in enumerate(schedule.ops)
    ]


def check(executor: SoftwareExecutor, schedule: Schedule, seed: int, queues: Queues, record: bool) -> None:
    """What the caller queues before, and what it queues after, are ordered with all ops; so are the ops."""
    values, device = Values(schedule, seed), Device(queues)
    adversary, seen = Adversary(device, seed), []
    device.launch(CALLER, run=values.begin, label="inputs")
    failure, times = executor.issue(
        device, ops_of(executor, schedule, values), caller_lane(schedule), record, adversary
    )
    assert failure is None
    assert all(start >= 0 and end >= start for start, end in times), "a time was asked for before its event"
    after = device.launch(CALLER, run=lambda: seen.append((values.ran, dict(values.now))), label="outputs")
    adversary.run_until(after)
    assert seen == [Values(schedule, seed).expected()], (schedule.name, seed, queues)
    adversary.run_until(None)


def check_spans(executor: SoftwareExecutor, schedule: Schedule, seed: int) -> None:
    """Recorded are the times that the simulator predicts."""
    chooser = random.Random(seed)
    seconds = [chooser.choice((0.0, 0.5, 1.0, 3.0)) for _ in schedule.ops]
    device = Device(Queues.MANY)
    ops = [
        (LANES.index(op.lane), op.waits_for, [lambda op=op, took=took: work(op, took, group=op.group)], op.meanwhile)
        for op, took in zip(schedule.ops, seconds, strict=True)
    ]
    _, times = executor.issue(device, ops, caller_lane(schedule), record=True)
    left = iter(seconds)
    spans = simulate(schedule, lambda op: next(left)).spans
    assert times == [pytest.approx((span.start, span.end)) for span in spans], schedule.name


def check_all(executor: SoftwareExecutor, seeds: range) -> None:
    chosen = random.Random(5).sample(sorted(SCHEDULES), 40)
    for seed in seeds:
        for schedule in (random_schedule(seed), SCHEDULES[chosen[seed % len(chosen)]]):
            check_spans(executor, schedule, seed)
            for queues in Queues:
                check(executor, schedule, seed, queues, record=seed % 3 == 0)


def test_ops_run_in_their_order_whatever_the_device_does_first(software_executor):
    check_all(software_executor, range(60))


def test_every_schedule_runs_under_every_policy(software_executor):
    for number, schedule in enumerate(SCHEDULES.values()):
        check(software_executor, schedule, number, Queues.ONE if number % 3 else Queues.MANY, record=False)


def test_pytorchs_cuda_sanitizer_finds_no_race_in_any_schedule(executor_folder):
    library = build(executor_folder)
    assert not {name: found for name, schedule in SCHEDULES.items() if (found := races(library, schedule))}


# It is told nothing of times, and an action is a kernel of its own to it.
NOT_THE_SANITIZERS = {name for name in mutants() if "recorded" in name or "two actions" in name}


@pytest.mark.parametrize("lacks", mutants())
def test_a_mutant_is_found(software_executor, executor_folder, lacks):
    library = build(executor_folder, mutants()[lacks])
    with pytest.raises((AssertionError, Stuck)):
        check_all(SoftwareExecutor(library, len(LANES)), range(60))
    found = any(races(library, schedule) for name, schedule in SCHEDULES.items() if name.startswith("mpmoe S4"))
    assert found == (lacks not in NOT_THE_SANITIZERS)


def test_a_failure_is_named_and_what_was_issued_is_still_waited_for(software_executor):
    schedule = SCHEDULES["monta O3 combine, 4 chunk(s), EP 2, expert-TP 2"]
    for failing in range(len(schedule.ops)):
        values, device = Values(schedule, 0), Device(Queues.MANY)
        values.actions = [1] * len(schedule.ops)
        ops, seen = ops_of(software_executor, schedule, values), []

        def refuse() -> Work:
            raise RuntimeError

        ops[failing] = (*ops[failing][:2], [refuse], 0)
        failure, _ = software_executor.issue(device, ops, -1)
        assert failure == (failing, "refused")
        after = device.launch(CALLER, run=lambda values=values, seen=seen: seen.append(values.ran))
        Adversary(device, failing).run_until(after)
        assert seen == [failing]


def test_ops_that_wait_for_later_ones_are_refused(software_executor):
    with pytest.raises(Refused, match="op 0 waits for op 0, which does not come before it"):
        software_executor.issue(Device(Queues.MANY), [(0, (0,), [], 0)], -1)


EXPERTS, MOVE = 3, 0  # lanes


@pytest.mark.parametrize("asks", [True, False])
def test_what_an_op_leaves_room_for_is_issued_halfway_through_it_or_behind(software_executor, asks):
    log = []

    def say(what: str) -> Work:
        log.append(what)
        return Work()

    def half() -> Work:
        if asks:
            software_executor.issue_meanwhile()
            software_executor.issue_meanwhile()  # for the second time: there is nothing left
        return say("second half")

    ops = [
        (EXPERTS, (), [lambda: say("first half"), half], 2),
        (MOVE, (), [lambda: say("dispatch")], 0),
        (MOVE, (), [lambda: say("combine")], 0),
        (MOVE, (0,), [lambda: say("combine what was computed"), half], 0),
    ]
    software_executor.issue(Device(Queues.ONE), ops, EXPERTS)
    middle = ["dispatch", "combine", "second half"] if asks else ["second half", "dispatch", "combine"]
    assert log == ["first half", *middle, "combine what was computed", "second half"]


def test_what_fails_halfway_through_an_op_is_named_and_nothing_follows(software_executor):
    log = []

    def refuse() -> Work:
        raise RuntimeError

    def half() -> Work:
        software_executor.issue_meanwhile()
        log.append("second half")
        return Work()

    ops = [(EXPERTS, (), [half], 2), (MOVE, (), [refuse], 0), (MOVE, (), [lambda: log.append("later")], 0)]
    failure, _ = software_executor.issue(Device(Queues.ONE), ops, EXPERTS)
    assert failure == (1, "refused")
    assert log == ["second half"]


@pytest.mark.parametrize(
    ("ops", "said"),
    [
        ([(0, (), [], 1)], "1 ops are to be issued halfway through op 0, which has 0 behind it"),
        ([(0, (), [], -1)], "-1 ops are to be issued halfway"),
        ([(0, (), [], 1), (0, (), [], 0)], "op 1 cannot be issued halfway through op 0"),
        ([(0, (), [], 1), (1, (0,), [], 0)], "op 1 cannot be issued halfway through op 0"),
        ([(0, (), [], 2), (1, (), [], 1), (2, (), [], 0)], "op 1 cannot be issued halfway through op 0"),
    ],
)
def test_what_cannot_be_issued_halfway_through_an_op_is_refused(software_executor, ops, said):
    with pytest.raises(Refused, match=said):
        software_executor.issue(Device(Queues.MANY), ops, -1)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_cuda_s_streams_compile():
    command = ["bash", "tools/check_cuda_compiles.sh", "--streams"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0 and "cuda_streams.cpp compiles" in done.stdout, done.stdout + done.stderr
