"""Runs one case after another, and says of each whether all ranks ended as they should."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.faults.cases import WORLD, Fault
from tests.ranks.job import Job
from tests.ranks.pool import CASE_TIMEOUT_S

SCRIPT = Path(__file__).parent / "rank.py"
WATCHED_S = 45.0
"""The seconds from the fault on after which a rank that has not ended hangs."""


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended."""

    status: int | None
    """Exit status, negative for a signal; None: it had not ended when it was last looked at."""
    seconds: float | None
    """Seconds after the fault; None: the rank had not ended."""
    output: str


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    fault: Fault
    ends: tuple[RankEnd, ...]
    wrong: tuple[str, ...]
    """What was not as it should be, in words; empty: nothing."""
    late: tuple[str, ...] = ()
    """The ranks, of those that ended, that took longer than allowed."""
    happened: bool = True
    """Whether the fault happened; False: the run ended before."""

    @property
    def is_good(self) -> bool:
        """Whether all ranks ended as they should, in time."""
        return not self.wrong and not self.late

    @property
    def seconds(self) -> float | None:
        """Returns the seconds until the last rank that could end had; None: one had not."""
        seconds = [end.seconds for end in self._judged]
        return None if None in seconds or not seconds else max(seconds)

    @property
    def _judged(self) -> list[RankEnd]:
        gone = {self.fault.victim} if self.fault.kind in ("kill", "stop") else set()
        return [end for rank, end in enumerate(self.ends) if rank not in gone]


def run(fault: Fault, folder: Path) -> Outcome:
    """Trains four ranks until the fault has ended them. `folder` is empty."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    store = None
    if not fault.rank_0_serves_store:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
        environment |= {
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    job = Job([SCRIPT, fault.to_json(), folder], folder / "early.txt", WORLD, environment)
    ended: dict[int, float] = {}
    begin, struck = time.monotonic(), None
    try:
        while len(ended) < WORLD:
            now = time.monotonic()
            ended |= {
                rank: now for rank, one in enumerate(job.processes) if rank not in ended and one.exitcode is not None
            }
            struck = struck or _struck(fault, folder)
            if now > (begin + CASE_TIMEOUT_S if struck is None else struck + WATCHED_S):
                break
            if fault.kind == "stop" and len(ended) == WORLD - 1 and fault.victim not in ended:
                break
            time.sleep(0.02)
        struck = struck or _struck(fault, folder)
    finally:
        statuses = [process.exitcode for process in job.processes]
        _ask_for_stacks(fault, job, ended)
        job.kill()
    ends = []
    for rank, status in enumerate(statuses):
        file = folder / f"output-{rank}.txt"
        seconds = None if struck is None or rank not in ended else ended[rank] - struck
        ends.append(RankEnd(status, seconds, file.read_text(errors="replace") if file.exists() else ""))
    layer = _noted(folder / "injected")[1:] or ["?"]
    wrong = ["the fault did not happen"] if struck is None else list(_faults_of_ends(fault, ends, layer[0]))
    late = tuple(
        f"rank {rank} ends after {end.seconds:.1f} s"
        for rank, end in enumerate(ends)
        if end.seconds is not None and end.seconds > fault.allowed_s
    )
    return Outcome(fault, tuple(ends), tuple(wrong), late, struck is not None)


def _ask_for_stacks(fault: Fault, job: Job, ended: Collection[int]) -> None:
    """Has ranks that hang print where they are."""
    hanging = set(range(WORLD)) - set(ended) - ({fault.victim} if fault.kind == "stop" else set())
    for rank in hanging:
        with suppress(ProcessLookupError):
            os.kill(job.processes[rank].pid, signal.SIGUSR1)
    if hanging:
        time.sleep(0.5)


def _noted(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


def _struck(fault: Fault, folder: Path) -> float | None:
    """Returns when the fault happened: where options differ, when the last rank began to build the model."""
    if not fault.from_the_start:
        injected = _noted(folder / "injected")
        return float(injected[0]) if injected else None
    begun = [_noted(folder / f"begins-{rank}") for rank in range(WORLD)]
    return max(float(words[0]) for words in begun) if all(begun) else None


def _faults_of_ends(fault: Fault, ends: list[RankEnd], layer: str) -> list[str]:
    wrong = []
    for rank, end in enumerate(ends):
        if rank == fault.victim and fault.kind in ("kill", "stop"):
            continue
        if end.status is None:
            wrong.append(f"rank {rank} hangs")
        elif end.status == 0:
            wrong.append(f"rank {rank} ends as if nothing had been")
        elif end.status < 0:
            wrong.append(f"rank {rank} ends by signal {-end.status}")
        if end.status is not None and not _names_cause(fault, end.output, layer):
            wrong.append(f"rank {rank} does not name rank {fault.victim} and the layer: {last_line(end.output)}")
    return wrong


def _names_cause(fault: Fault, output: str, layer: str) -> bool:
    """Whether a line says which rank failed first and in which layer, or which one's settings differ."""
    if fault.from_the_start:
        return any(
            re.search(rf"\branks? [\d, ]*\b{fault.victim}\b", line) and "error" in line.lower()
            for line in output.splitlines()
        )
    # Of those that disagree one fails first, maybe another one. Who was killed cannot say where it was: the layer is
    # then the one in which its silence was noticed.
    rank = r"\d+" if fault.kind == "disagree" else fault.victim
    number = layer if fault.kind == "raise" and fault.place in ("dispatch", "combine") else r"\d+"
    return bool(re.search(rf"rank {rank} .*failed first.*layer {number}\b", output))


def last_line(output: str) -> str:
    """Returns what an output ends with."""
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was printed"
