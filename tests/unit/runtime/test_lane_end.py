"""A process ends as it would had it started no schedule, whatever those that it started wait for."""

from __future__ import annotations

import subprocess
import sys

# A process forks a pair of ranks for each way to end. Rank 0 starts a gather from rank 1, which sends nothing until
# rank 0 is so far in its end that no thread may come back to the interpreter; then rank 1 ends, with which the gather
# fails.
SCRIPT = """
import os, signal, sys, tempfile, time
import torch
import torch.distributed as dist
from megatron_moe_opt.runtime.engine import started, steps
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule

started.END_S = 0.3
gathered = torch.empty(2, 1)


def start_gather(own):
    gather = steps.all_gather(own, gathered, [1, 1], dist.group.WORLD)
    schedule = Schedule("gather", (Op(Kind.ALL_GATHER, Lane.EXPERTS, group="experts"),))
    return executor().start(schedule, [gather])


signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells have their background jobs ignore
for END in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        break
    print(END, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=": ", flush=True)
else:
    os._exit(0)
folder = tempfile.mkdtemp()
gone, tell = os.pipe()
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
if rank == 1:
    os.close(tell)
    if END == "late":  # takes part while rank 0 ends
        time.sleep(0.2)
        start_gather(torch.ones(1, 1)).wait()
    os.read(gone, 1)
    os._exit(0)


class Last:
    '''Ends with the interpreter.'''

    def __del__(self, write=os.write, sleep=time.sleep):
        write(tell, b"x")
        sleep(0.3)


sys.last = Last()
running = start_gather(torch.zeros(1, 1))
time.sleep(0.1)
if END == "late":
    import atexit
    started.END_S = 60.0
    atexit.unregister(started._end_queues)
    atexit.register(lambda: print("gathered", (running.wait(), gathered.view(-1).tolist())[1], flush=True))
    atexit.register(started._end_queues)  # before the other
elif END == "sys.exit":
    sys.exit(3)
elif END == "exception":
    raise ValueError("as another may raise")
elif END == "SIGTERM handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
    os.kill(os.getpid(), signal.SIGTERM)
elif END == "destroyed":
    dist.destroy_process_group()
elif END.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, END))
    time.sleep(1)
"""


STATUS = {
    "normal": 0,
    "destroyed": 0,
    "sys.exit": 3,
    "exception": 1,
    "SIGINT": -2,
    "SIGTERM": -15,
    "SIGTERM handled": 4,
    "late": 0,
}


def test_a_process_that_waits_for_what_it_started_ends_as_it_would_without():
    ended = subprocess.run([sys.executable, "-c", SCRIPT, *STATUS], capture_output=True, text=True, timeout=240)
    gathered = "gathered [0.0, 1.0]"  # by the last one, whose peer takes part
    assert ended.stdout.splitlines() == [
        *(f"{end}: {status}" for end, status in STATUS.items() if end != "late"), gathered, "late: 0",
    ], ended.stderr  # fmt: skip
