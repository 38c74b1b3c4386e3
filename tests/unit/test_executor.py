"""The executor without process groups: ops that run it again, and forked processes, with all else that has threads."""

from __future__ import annotations

import subprocess
import sys
import threading

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
from megatron_moe_opt.runtime.engine.communication_lane import communication_lane
from tests.unit.test_executor import Lane, executor, schedule, steps

def use():
    ran = []
    lanes = Lane.COPY, Lane.INTER, Lane.COMPUTE
    executor().run(schedule(*lanes), [steps.call(lambda: ran.append(threading.get_ident()))] * 3)
    assert len(set(ran)) == 3
    assert background(sum, (1, 2)).result() == 3 and _learner().submit(sum, (1, 2)).result() == 3
    assert communication_lane("test", torch.device("cpu")).submit(lambda: torch.ones(()))() == 1

use()
held = threading.Event()
before = [background(held.wait), communication_lane("test", torch.device("cpu")).submit(held.wait)]
signal.alarm(100)
child = os.fork()
if child == 0:
    use()
    for result in (before[0].result, before[1]):
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
