"""Scripts on several ranks as torchrun starts them, but in processes that have imported PyTorch and Megatron already.

job = Job(["recipes/pretrain_moe_gpt.py", "--train-iters", "3"], output=tmp_path / "output.txt", ranks=4)
assert job.wait() == 0
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from tests.ranks.pool import CASE_TIMEOUT_S, GRACE_S, preloaded_processes
from tools.forked_ranks import die_with_parent, print_into, run_as_interpreter


class Job:
    """Processes, one a rank, that execute a script and print into one file.

    Args:
        words: path of the script, and its arguments.
        output: a file, made anew.
        ranks: processes that find each other by torchrun's variables; None: a single one, started without torchrun.
        environment: variables of the processes, besides this one's. With MASTER_PORT: the port of a store.
        before: called in each of them before the script; a function of a module.
    """

    def __init__(
        self,
        words: Sequence[str | Path | int],
        output: Path,
        ranks: int | None = None,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.output = output
        output.write_text("")
        common, world = dict(environment or {}), ranks or 1
        if ranks is not None:
            common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}
            common.setdefault("MASTER_PORT", str(free_port()))
        self.processes = []
        with preloaded_processes() as context:
            for rank in range(world):
                variables = common | ({} if ranks is None else {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                # Not daemons, because those may have no children and checkpoint writers are.
                arguments = (list(map(str, words)), output, variables, before)
                self.processes.append(context.Process(target=_execute, args=arguments))
                self.processes[-1].start()

    def ended(self) -> bool:
        """Whether a rank has ended."""
        return any(process.exitcode is not None for process in self.processes)

    def wait(self, timeout_s: float = CASE_TIMEOUT_S) -> int:
        """Exit status: 0, or that of the first rank that failed; the others then get a while, and are killed.

        Raises:
            TimeoutError: it did not end in time; it is killed.
        """
        deadline, status = time.monotonic() + timeout_s, 0
        pending = {process.sentinel: process for process in self.processes}
        try:
            while pending and (left := deadline - time.monotonic()) > 0:
                for sentinel in wait(list(pending), timeout=left):
                    process = pending.pop(sentinel)
                    process.join()
                    if process.exitcode and not status:
                        status, deadline = process.exitcode, min(deadline, time.monotonic() + GRACE_S)
        finally:
            self.kill()
        if pending and not status:
            raise TimeoutError(f"{len(pending)} rank(s) did not end in {timeout_s} s:\n{self.output.read_text()}")
        return status

    def kill(self) -> None:
        """Kill the ranks and what they have started."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.join()


def output_of(module: str, *words: str | Path | int) -> str:
    """Returns what `python -m MODULE WORDS` prints in a process of its own, which is no rank; it must end with 0."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job([importlib.util.find_spec(module).origin, *words], Path(folder, "output.txt"))
        status = job.wait()
        output = job.output.read_text()
    assert status == 0, output
    return output


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _execute(words: list[str], output: Path, variables: dict[str, str], before: Callable[[], None] | None) -> None:
    os.setpgrp()
    die_with_parent()
    os.environ.update(variables)
    with open(output, "a") as file:
        print_into(file)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    if before is not None:
        before()
    run_as_interpreter(lambda: runpy.run_path(words[0], run_name="__main__"))
