"""How long schedules take with one hardware queue and with many, in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.issue_order import in_issue_order
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op
from tests.accelerator.all_schedules import all_schedules
from tests.accelerator.executor_library import SoftwareExecutor, build
from tests.accelerator.makespans import LANES, makespan, nominal, nominal_makespan, overlap, table
from tests.accelerator.software import Queues
from tests.schedule_checks import validate

SCHEDULES = all_schedules()
DOCS = Path(__file__).parents[3] / "docs" / "streams.md"


def test_one_queue_costs_nothing_without_experts_and_little_with_them(software_executor):
    """Beside experts runs what was launched before them or halfway: docs/streams.md says what that costs."""
    most = 1.034
    for name, schedule in SCHEDULES.items():
        validate(schedule)
        one, many = (nominal_makespan(software_executor, name, queues) for queues in (Queues.ONE, Queues.MANY))
        assert many <= one <= (most if Lane.COMPUTE in schedule.lanes else 1 + 1e-9) * many, name


def test_the_table_of_the_docs_is_what_comes_out(software_executor):
    assert table(software_executor) in DOCS.read_text()


def test_the_planner_plays_what_the_executor_does(software_executor):
    """Beside lanes that disturb nobody it plays it another way, and comes to the same."""
    undisturbed = {(Lane.INTER, Lane.COMPUTE): 1.0}
    for name, schedule in SCHEDULES.items():
        for queues in Queues:
            seconds = nominal_makespan(software_executor, name, queues)
            for slowdown in (None, undisturbed):
                played = simulate(schedule, nominal, slowdown, one_queue=queues is Queues.ONE)
                assert played.seconds == pytest.approx(seconds), name


def test_overlap_is_busy_time_beside_another_lane(software_executor):
    """Two chunks have two all-to-alls in one lane; two gathers and a copy of 0.1 behind each in the other. The second
    all-to-all runs beside the first gather.
    """
    two_chunks, alone = "monta O2 dispatch, 2 chunk(s), EP 2, expert-TP 2", "parm dispatch, 1 chunk(s), expert-TP 2"
    for queues in Queues:
        assert overlap(software_executor, two_chunks, queues) == pytest.approx(2 / 4.2)
        assert overlap(software_executor, alone, queues) == 0


def test_waiting_at_once_would_serialise(software_executor, executor_folder):
    """An executor that waits for each collective where it issues it, in one queue and in many."""
    mutate = lambda text: text.replace("    issued_[i] =", "    join(stream, i);\n    issued_[i] =")  # noqa: E731
    waiting = SoftwareExecutor(build(executor_folder, mutate), len(LANES))
    monta, mpmoe = "monta O3 dispatch, 4 chunk(s), EP 2, expert-TP 2", "mpmoe none forward, 4 partition(s), EP 2"
    for name, many, one, waited in ((monta, 5.1, 5.1, 8.1), (f"{mpmoe}, expert-TP 1", 10.4, 10.5, 15.5)):
        schedule = SCHEDULES[name]
        assert makespan(software_executor, schedule, nominal, Queues.ONE) == pytest.approx(one), name
        assert makespan(waiting, schedule, nominal, Queues.ONE) == pytest.approx(waited), name
        assert makespan(waiting, schedule, nominal, Queues.MANY) == pytest.approx(many), name


def other_cost(chooser: random.Random) -> Callable[[Op], float]:
    """Collectives inside a node and copies from little to most of the time, experts and the host's copies too."""
    intra, copy, experts, host = (
        math.exp(chooser.uniform(math.log(least), math.log(most)))
        for least, most in ((0.25, 1.0), (0.02, 0.3), (0.25, 5.0), (0.25, 2.0))
    )
    of_kind = dict.fromkeys((Kind.PERMUTE, Kind.COPY, Kind.SUM, Kind.ACTIVATE), copy)
    of_kind |= {Kind.COMPUTE: experts, Kind.GRADIENT: 2 * experts, Kind.OFFLOAD: host, Kind.PREFETCH: host}
    of_kind |= {Kind.SHARED: experts / 4, Kind.SHARED_GRADIENT: experts / 2}
    return lambda op: of_kind.get(op.kind, intra if op.lane is Lane.INTRA else 1.0)


def test_what_ops_really_take_may_be_something_else(software_executor):
    chooser, took = random.Random(3), dict[str, float]()
    for name, schedule in SCHEDULES.items():
        cost = other_cost(chooser)
        one, many = (makespan(software_executor, schedule, cost, queues) for queues in (Queues.ONE, Queues.MANY))
        took[name] = one / many
    assert max(took.values()) < 1.24, max(took, key=took.get)
    assert sum(ratio > 1.15 for ratio in took.values()) < 0.01 * len(took)


@pytest.mark.parametrize("seed", range(20))
def test_the_order_keeps_that_of_lanes_and_waits(seed):
    from tests.multirank.test_executor import random_schedule

    schedule = random_schedule(seed)
    order, ordered = in_issue_order(schedule.ops)
    assert sorted(order) == list(range(len(schedule.ops)))
    for lane in Lane:
        of_lane = [index for index in order if schedule.ops[index].lane is lane]
        assert of_lane == sorted(of_lane)
    for number, (index, op) in enumerate(zip(order, ordered, strict=True)):
        assert all(other < number for other in op.waits_for)
        assert [order[other] for other in op.waits_for] == list(schedule.ops[index].waits_for)
