"""A pool of rank processes that execute functions of test modules.

def square(x):                      # module level, executed on every rank
    return x * x * dist.get_rank()

def test_square(ranks):             # the fixture of tests/conftest.py
    assert ranks.run(square, x=3) == [0, 9, 18, 27]
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from tools.forked_ranks import die_with_parent

# These end what hangs; a busy machine takes many times longer than an idle one, so they are far above both.
START_TIMEOUT_S = CASE_TIMEOUT_S = 300
# How long the other ranks may take to report after one has failed, before they are taken to hang.
GRACE_S = 30
# Environment variable, set where each rank has a GPU: devices.py.
GPUS = "RANKS_ON_GPUS"
# Environment variable: the extension for the emulator that stands for the GPUs, see tests/emulator/plugin.py.
EMULATOR = "MOE_OPT_EMULATOR"


@contextlib.contextmanager
def preloaded_processes() -> Iterator[BaseContext]:
    """Starts fresh processes for which importing torch and Megatron is done once: a server imports, and forks them.

    With GPUs each process imports for itself: what is imported may call CUDA, which does not survive a fork.
    """
    emulated = EMULATOR in os.environ
    context = multiprocessing.get_context("spawn" if GPUS in os.environ and not emulated else "forkserver")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload([*(["tests.emulator.plugin"] * emulated), "tests.ranks.preload"])
    # PyTorch reads its thread count when it is imported, which is before our code runs.
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield context
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


class RankFailure(RuntimeError):
    """A case failed on a rank; the text has the rank and its traceback. `errors` holds (rank, type name, message)."""

    def __init__(self, text: str, errors: list[tuple[int, str, str]]) -> None:
        super().__init__(text)
        self.errors = errors


class RankPool:
    """`world` processes with torch.distributed initialized: over Gloo with the host backend in use, or over NCCL with
    a GPU each, where GPUS is set.

    The processes start with the first case. They are stopped and started afresh after a case that timed out or that
    failed on some ranks only, since the others may then wait in a collective for ever.
    """

    def __init__(self, world: int = 4) -> None:
        self.world = world
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = Path()
        self._store: Any = None

    def run(self, function: Callable[..., Any], timeout_s: float = CASE_TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """Execute `function(**kwargs)` on every rank and return the results in rank order.

        Raises:
            RankFailure: with rank and traceback, if it raised on any rank.
            TimeoutError: if a rank did not finish in `timeout_s`; names the ranks that had not.
        """
        if not self._processes:
            self._start()
        # Pytest puts folders of test modules on sys.path as it finds them.
        path, case = pickle.dumps(sys.path), pickle.dumps((function, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(path)
            pipe.send_bytes(case)
        return self._collect(f"{function.__module__}.{function.__qualname__}", timeout_s)

    def close(self) -> None:
        """Stop the processes, by force."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started, such as checkpoint writers
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            shutil.rmtree(self._folder)
            atexit.unregister(self.close)
        self._processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        from torch.distributed import TCPStore

        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        # Served here, so that no rank's end is that of the store. Ranks wait at a file's in steps of 10 ms, at each of
        # the dozens of groups of a layout.
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        atexit.register(self.close)
        with preloaded_processes() as context:
            for rank in range(self.world):
                ours, theirs = context.Pipe()
                # Not daemons, because those may have no children and checkpoint writers are; `close` ends them.
                served = (theirs, rank, self.world, self._folder, self._store.port)
                process = context.Process(target=_serve, args=served)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        self._collect("starting the ranks", START_TIMEOUT_S)

    def _collect(self, case: str, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, tuple[str, str, str]] = {}
        deadline = time.monotonic() + timeout_s
        pending = dict(enumerate(self._pipes))
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(pending.values()), timeout=left)
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                try:
                    succeeded, value = pickle.loads(pending.pop(rank).recv_bytes())
                except EOFError:
                    succeeded, value = False, ("process", self._end_of(rank), "")
                if succeeded:
                    results[rank] = value
                else:
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not errors and not pending:
            return [results[rank] for rank in range(self.world)]
        stacks = self._stacks(sorted(pending))
        in_step = len(errors) == self.world and len({error[:1] for error in errors.values()}) == 1
        if not in_step:
            self.close()
        if not errors:
            raise TimeoutError(f"{case}: rank(s) {sorted(pending)} did not finish in {timeout_s} s{stacks}")
        raise RankFailure(_describe(case, errors) + stacks, [(rank, *errors[rank][:2]) for rank in sorted(errors)])

    def _end_of(self, rank: int) -> str:
        """How a rank ended that gave no answer: its exit code (a signal's is negative), and where a signal met it."""
        process = self._processes[rank]
        process.join(GRACE_S)
        return f"the process ended with exit code {process.exitcode}\n{_stack_file(self._folder, rank).read_text()}"

    def _stacks(self, hanging: list[int]) -> str:
        """Where each hanging rank is: its Python stack, which the signal makes it write."""
        for rank in hanging:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if hanging:
            time.sleep(0.5)
        return "".join(
            f"\n\nrank {rank} did not finish; it was at:\n{_stack_file(self._folder, rank).read_text()}"
            for rank in hanging
        )


def _describe(case: str, errors: dict[int, tuple[str, str, str]]) -> str:
    first, *others = sorted(errors)
    kind, message, trace = errors[first]
    text = f"{case} failed on rank {first}: {kind}: {message}\n{trace}"
    return text + "".join(f"\nalso on rank {rank}: {errors[rank][0]}: {errors[rank][1]}" for rank in others)


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"


def _serve(pipe: Connection, rank: int, world: int, folder: Path, port: int) -> None:
    """Body of a rank process: initialize, then execute cases until the pipe closes."""
    die_with_parent()
    os.setpgrp()
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):  # of a job around the tests, whose ranks these are not
        os.environ.pop(name, None)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        GLOO_SOCKET_IFNAME="lo",
    )
    stacks = open(_stack_file(folder, rank), "w")  # noqa: SIM115 (open for the process's life)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    faulthandler.enable(file=stacks)  # for `_end_of`
    _answer(pipe, lambda: _initialize(rank, world, port))
    while True:
        try:
            path, case = pickle.loads(pipe.recv_bytes()), pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # no clean-up: the other ranks are gone or going
        sys.path.extend(entry for entry in path if entry not in sys.path)
        _answer(pipe, lambda case=case: _execute(case))


def _execute(case: bytes) -> Any:
    from megatron_moe_opt.runtime.observed import layer_place

    function, kwargs = pickle.loads(case)
    layer_place._now = None  # errors of a case do not name the layers of the one before it
    environment = dict(os.environ)
    try:
        return function(**kwargs)
    finally:  # the next case finds the nodes, and all else, that this one found
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()
        gc.freeze()  # what stays of this case is not looked through whenever a later one collects garbage


def _initialize(rank: int, world: int, port: int) -> None:
    if EMULATOR in os.environ:
        import tests.emulator.plugin  # noqa: F401 (before PyTorch)

    import torch.distributed as dist

    import tests.ranks.preload  # noqa: F401 (where the fork server could not)
    from tests.ranks import devices

    if GPUS in os.environ:
        devices.use_gpu()
    backend = "nccl" if GPUS in os.environ else "gloo"
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    dist.barrier()


class _FromDevice(pickle.Pickler):
    """Pickles tensors of a GPU as those of the host: the test's process need not see that GPU."""

    def reducer_override(self, one: Any) -> Any:
        """Reduces tensors of a GPU to those of the host; NotImplemented: as always."""
        if getattr(one, "is_cuda", False) is True:
            return one.cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _pickled(answer: Any) -> bytes:
    data = io.BytesIO()
    _FromDevice(data).dump(answer)
    return data.getvalue()


def _answer(pipe: Connection, run: Callable[[], Any]) -> None:
    try:
        data = _pickled((True, run()))
    except BaseException as error:  # a SystemExit of the code under test is a failure like any other
        data = pickle.dumps((False, (type(error).__name__, str(error), traceback.format_exc())))
    pipe.send_bytes(data)
