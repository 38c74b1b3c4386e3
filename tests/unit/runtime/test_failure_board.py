"""Which rank of a job failed first, told through the job's store."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.runtime.job.failure_board import FailureBoard
from megatron_moe_opt.runtime.job.job_store import of_this_attempt
from tests.ranks.job import Job, free_port

# Layers of their own numbers: what a rank says about itself must not be taken for what the others say about it.
RANK = """
import ctypes, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.observed.layer_place import Place, passing
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
rank, fault = int(os.environ.get("RANK", os.environ["SLURM_PROCID"])), sys.argv[1]
dist.init_process_group("gloo", rank=rank, world_size=3)
failure_board.start()
dist.barrier()
with passing(Place(rank + 1, "monta", "forward")), failure_board.told():
    if rank == 1:
        if fault == "raise":  # and keeps its connections for a while
            threading.Thread(target=time.sleep, args=(4,)).start()
            raise ValueError("boom")
        if fault == "end":
            sys.exit()
        if fault == "abort":  # as PyTorch's watchdogs do, without Python's lock
            threading.Thread(target=ctypes.CDLL(None).abort).start()
            time.sleep(60)
        if fault == "longer":  # for which Gloo's thread ends the process, if it may
            dist.recv(torch.zeros(1), 2)
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "end":
        sys.exit()
    if rank == 0 and fault == "raise":
        gathered = torch.zeros(3, 4)
        step = steps.all_gather(gathered[:1], gathered, [1] * 3, dist.group.WORLD)
        op = Op(Kind.ALL_GATHER, Lane.INTER, 1, group="world")
        executor().run(Schedule("test", (op,)), [step])
    if rank == 2 and fault == "longer":
        dist.send(torch.zeros(64), 1)
    if rank == 2 and fault == "kill":  # who finds a closed connection, while others wait where nothing is closed
        time.sleep(0.2)
        raise dist.DistBackendError("Connection closed by peer")
    time.sleep(60)
"""


def end(fault: str, folder: Path, named: bool = True) -> tuple[list[int], list[str]]:
    """Status of three ranks, and what they have said.

    Args:
        named: the environment has PyTorch's names for ranks; False: Slurm's alone.
    """
    script = folder / "rank.py"
    script.write_text(RANK)
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}

    def variables(rank: int) -> dict[str, str]:
        return shared | {"SLURM_PROCID": str(rank)} | ({"RANK": str(rank), "WORLD_SIZE": "3"} if named else {})

    ranks = [Job([script, fault], folder / f"{rank}.txt", environment=variables(rank)) for rank in range(3)]
    return [rank.wait() for rank in ranks], [rank.output.read_text() for rank in ranks]


@pytest.mark.parametrize(
    ("fault", "sentence", "named"),
    [
        ("raise", "failed first, in MoE layer 2 (monta, forward): ValueError: boom", False),
        ("longer", "failed first, in MoE layer 2 (monta, forward): a thread has died of an exception: ", True),
        ("abort", "failed first, in MoE layer 2 (monta, forward): a thread has died of SIGABRT, as NCCL's ", True),
        ("kill", "failed first, in MoE layer 3 (monta, forward): it does not answer any more, as rank 2 found: ", True),
    ],
)
def test_every_rank_says_who_failed_first_and_ends(tmp_path: Path, fault: str, sentence: str, named: bool):
    status, said = end(fault, tmp_path, named)
    assert status == [1, {"kill": -9, "abort": -6}.get(fault, 1), 1]  # an abort still has its handlers, and its core
    for rank, text in enumerate(said):
        line = next((line for line in text.splitlines() if line.startswith("moe-opt: error: rank 1 (")), "")
        assert (rank == 1 and fault == "kill") or sentence in line, (rank, text)

    if fault == "raise":  # interrupted where it waited
        assert re.search(r"LaneError: rank 1 .*boom; rank 0 gave up in MoE layer 1 .*chunk 1 .* given up", said[0]), (
            said[0]
        )


def test_ranks_that_end_say_nothing(tmp_path: Path):
    status, said = end("end", tmp_path)
    assert status == [0, 0, 0] and said == ["", "", ""]


def test_ranks_that_give_up_at_once_all_name_one_that_is_silent(monkeypatch: pytest.MonkeyPatch):
    """Their own watchers have died, of NCCL's watchdogs; one of them asks for all, as their store is one process."""
    monkeypatch.setattr(FailureBoard, "_watch", lambda board: None)
    store, asked = dist.HashStore(), []
    boards = [FailureBoard(store, rank, 20) for rank in range(8)]
    call = FailureBoard._call_roll

    def calling(board: FailureBoard) -> list[int]:
        silent = call(board)
        asked.extend([board.rank] * bool(silent))
        return silent

    monkeypatch.setattr(FailureBoard, "_call_roll", calling)
    found: dict[int, failure_board.Failure] = {}
    threads = [
        threading.Thread(target=lambda board=board: found.update({board.rank: board.notice("NCCL's watchdog")}))
        for board in boards
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(asked) == 1 and len(found) == 8 and len(set(found.values())) == 1
    assert found[0].rank == 8 and "nor do ranks 9, 10, 11, 12, 13, 14, 15, 16 and 3 more, as rank" in found[0].what


def test_a_process_that_may_start_no_thread_any_more_ends_as_others_do(monkeypatch: pytest.MonkeyPatch):
    """Early CPython 3.12 starts none in functions of atexit."""
    extension = SimpleNamespace(let_end=lambda: None, uncaught_exception=lambda: None)
    monkeypatch.setattr(failure_board, "_extension", lambda: extension)
    store, status = dist.HashStore(), []
    through, failed = (FailureBoard(one, 0, 1, served_by_rank=0) for one in (store, dist.HashStore()))
    failed.report("boom")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(os, "_exit", status.append)
    through.end()
    assert store.get("alarm") == b"end" and not status
    failed.end()
    assert status == [1]


def test_no_group_of_nccl_is_aborted_behind_another(monkeypatch: pytest.MonkeyPatch):
    """One may wait for its ranks, and the others are what these wait in."""
    aborted, goes_on = [], threading.Event()

    class Group:
        def __init__(self, name: str, kind: str) -> None:
            self.name, self.kind = name, kind

        def abort(self) -> None:
            if self.name == "experts":
                goes_on.wait(60)
            aborted.append(self.name)

    groups = [Group("world", "cpu:gloo,cuda:nccl"), Group("on the host", "gloo"), Group("experts", "nccl")]
    monkeypatch.setattr(dist, "get_backend", lambda group: group.kind)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    failure_board._abort_nccl()
    for number, name in enumerate(("world", "experts"), start=1):
        deadline = time.monotonic() + 60
        while len(aborted) < number and time.monotonic() < deadline:
            time.sleep(0.01)
        assert aborted[number - 1 :] == [name]
        goes_on.set()


def test_an_attempt_reads_nothing_of_the_one_before():
    """Ranks come in any order, on a store that knows others of their numbers."""
    store = dist.HashStore()
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        found: dict[int, dist.Store | None] = {}

        def come(rank: int, found: dict[int, dist.Store | None] = found) -> None:
            found[rank] = of_this_attempt(store, rank, 3, lambda: bool(time.sleep(0.01)))

        threads = [threading.Thread(target=come, args=(rank,)) for rank in order]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join(10)
        assert not any(one.check(["first"]) for one in found.values())
        found[1].set("first", "a failure")
        assert all(one.get("first") == b"a failure" for one in found.values())


def test_a_rank_that_is_alone_gives_up_when_it_is_told_to():
    turns = iter((False, False, True))
    assert of_this_attempt(dist.HashStore(), 1, 2, lambda: next(turns)) is None


RESTARTED = """
import os, time
import torch
import torch.distributed as dist
from megatron_moe_opt.runtime.job import failure_board
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
store, rank, world = next(dist.rendezvous("env://"))
# A store of the attempt for Gloo: in the launcher's it may find the address of a process of the attempt before.
dist.init_process_group("gloo", store=dist.PrefixStore(attempt, store), rank=rank, world_size=world)
failure_board.start()
for step in range(4):
    with failure_board.told():
        if (rank, attempt, step) == (1, "0", 2):
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1))
    time.sleep(0.3)
print(f"rank {rank} is through", flush=True)
"""


def test_a_job_that_torchrun_starts_again_goes_on(tmp_path: Path):
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    done = subprocess.run(
        [sys.executable, *torchrun, str(script)], capture_output=True, text=True, timeout=200, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("rank . is through", done.stdout)) == ["rank 0 is through", "rank 1 is through"]
    assert "failed first, before the first MoE layer: ValueError: boom" in done.stderr
