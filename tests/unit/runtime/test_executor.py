"""The executor without process groups: ops that run it again, and forked processes, with all else that has threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from megatron_moe_opt.dispatchers import sample_placement
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.executor import LaneError, executor
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule


def schedule(*lanes: Lane) -> Schedule:
    return Schedule("test", tuple(Op(Kind.COPY, lane, 0, 0, (), (), ()) for lane in lanes), ())


@pytest.mark.parametrize("lane", [Lane.COMPUTE, Lane.COPY])  # the caller's, one with a thread of its own
def test_an_op_that_runs_its_executor_fails(lane):
    both, inner = schedule(lane, Lane.COMPUTE), schedule(Lane.COPY)
    nested = steps.call(lambda: executor().run(inner, [steps.Steps()]))
    with pytest.raises(LaneError, match="an op runs a schedule on the executor that it is an op of") as error:
        executor().run(both, [nested, steps.Steps()])
    assert isinstance(error.value.__cause__, RuntimeError)
    executor().run(inner, [steps.Steps()])


@pytest.mark.parametrize("raised", [MemoryError, KeyboardInterrupt])
def test_what_has_failed_keeps_nothing_of_who_called(raised):
    class Held:
        pass

    def fail() -> None:
        raise raised

    def call() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises((LaneError, KeyboardInterrupt)):
            executor().run(schedule(Lane.COPY, Lane.COMPUTE), [steps.call(fail), steps.Steps()])
        return weakref.ref(held)

    of_caller = call()
    gc.collect()
    assert of_caller() is None


def test_what_was_started_runs_in_order_beside_schedules_and_names_what_failed():
    """The first one holds the queue until a schedule has run beside it."""
    ran, held = [], threading.Event()
    alone = schedule(Lane.EXPERTS)

    def step(name: str) -> list[steps.Steps]:
        return [steps.call(lambda: ran.append(name))]

    def fail() -> None:
        raise ValueError("boom")

    first = executor().start(alone, [steps.call(held.wait) + step("first")[0]])
    failing = executor().start(alone, [steps.call(fail)])
    last = executor().start(alone, step("last"))
    other = executor().start(alone, step("other"), "another queue")
    other.wait()
    executor().run(schedule(Lane.COPY), step("beside"))
    held.set()
    last.wait()
    assert ran == ["other", "beside", "first", "last"]
    first.wait(), last.wait()  # any number of times
    with pytest.raises(LaneError, match="lane experts: copy of chunk 0 failed: ValueError: boom$") as error:
        failing.wait()
    assert isinstance(error.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="test is in 2 lanes: a schedule that is started is in one"):
        executor().start(schedule(Lane.EXPERTS, Lane.COPY), step("one") + step("two"))


def test_the_thread_that_decides_uses_the_caller_s_device(monkeypatch):
    """A thread begins on the node's first GPU, in which it would take memory."""
    used = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((device, threading.get_ident())))
    sample_placement._worker.cache_clear()
    try:
        (thread,) = {sample_placement.background(threading.get_ident).result() for _ in range(2)}
    finally:
        sample_placement._worker.cache_clear()
    assert used == [(3, thread)] and thread != threading.get_ident()


FORKS = """
import os, signal, sys, threading
import torch
from megatron_moe_opt.dispatchers.sample_placement import _learner, background
from tests.unit.runtime.test_executor import Lane, executor, schedule, steps

def use():
    ran = []
    lanes = Lane.COPY, Lane.INTER, Lane.COMPUTE
    executor().run(schedule(*lanes), [steps.call(lambda: ran.append(threading.get_ident()))] * 3)
    assert len(set(ran)) == 3
    assert background(sum, (1, 2)).result() == 3 and _learner().submit(sum, (1, 2)).result() == 3
    executor().start(schedule(Lane.EXPERTS), [steps.call(lambda: ran.append(threading.get_ident()))]).wait()
    assert len(set(ran)) == 4

use()
held = threading.Event()
before = [background(held.wait), executor().start(schedule(Lane.EXPERTS), [steps.call(held.wait)])]
signal.alarm(100)
child = os.fork()
if child == 0:
    use()
    for result in (before[0].result, before[1].wait):
        try:
            result()
        except RuntimeError as error:
            assert "a thread of its parent had begun" in str(error)
        else:
            raise AssertionError
    sys.exit()  # with all that Python does at its end
held.set()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
use()
sys.exit(code)
"""


def test_forked_processes_have_threads_of_their_own():
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=200)
