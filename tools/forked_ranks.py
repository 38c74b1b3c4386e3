"""Runs jobs of several ranks like torchrun, but forks the ranks from this process, with all that it has imported.

A rank that torchrun starts imports PyTorch and Megatron for some 5 s of processor time; a forked one has them. Nothing
that starts a thread may have been called in this process before.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

DID_NOT_END = 124
"""Exit status of a job that was ended because it took too long, like timeout(1)'s."""
GRACE_S = 30
"""How long ranks may take to end that are asked to; torchrun's."""


def start_job(
    main: Callable[[], object], ranks: int, environment: Mapping[str, str], folder: Path, timeout: float
) -> int:
    """Starts a process that runs a job: it is to its ranks what torchrun is. Returns its id, for os.wait.

    It serves the store that ranks find each other by, asks the others to end when one has failed, and exits with 0, 1
    where a rank failed, or DID_NOT_END.

    Args:
        main: called in each rank, in `folder`.
        environment: variables of the ranks, besides this process's and those by which torchrun tells a rank its place.
        folder: where rank R writes what it prints, as R.txt.
        timeout: in seconds.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    job = os.fork()
    if job == 0:
        status = 1
        try:
            die_with_parent()
            status = _run(main, ranks, environment, folder, timeout)
        finally:
            os._exit(status)
    return job


def _run(main: Callable[[], object], ranks: int, environment: Mapping[str, str], folder: Path, timeout: float) -> int:
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    running = set()
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            listener.close()
            places = shared | {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
            _become_rank(main, {**environment, **{name: str(value) for name, value in places.items()}}, folder, rank)
        running.add(child)
    # After the ranks: the store has a thread, which a forked process would lack.
    # The store of libuv, PyTorch's default, takes no socket in PyTorch 2.6.
    own = {"is_master": True, "wait_for_workers": False, "use_libuv": False}
    store = TCPStore("127.0.0.1", port, master_listen_fd=listener.detach(), **own)
    deadline, status = time.monotonic() + timeout, 0
    while running:
        child, ended = os.waitpid(-1, os.WNOHANG)
        if child:
            running.remove(child)
            if ended and not status:
                status, deadline = 1, _end(running)
        elif time.monotonic() < deadline:
            time.sleep(0.02)
        elif not status:
            status, deadline = DID_NOT_END, _end(running)
        else:
            for left in running:
                os.kill(left, signal.SIGKILL)
            deadline = float("inf")
    del store
    return status


def _end(running: set[int]) -> float:
    """Asks processes to end. Returns until when they may."""
    for child in running:
        os.kill(child, signal.SIGTERM)
    return time.monotonic() + GRACE_S


def _become_rank(main: Callable[[], object], variables: Mapping[str, str], folder: Path, rank: int) -> None:
    """Calls main and ends, both as an interpreter that was started for it."""
    die_with_parent()
    os.environ.update(variables)
    os.chdir(folder)
    with open(f"{rank}.txt", "w") as output:
        print_into(output)
    run_as_interpreter(main)


def print_into(file: TextIO) -> None:
    """Has this process, and what it starts, print into a file from here on."""
    for descriptor in (1, 2):
        os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))  # noqa: SIM115


def run_as_interpreter(main: Callable[[], object]) -> NoReturn:
    """Calls main and ends this forked process as an interpreter ends that was started for it, with its exit status."""
    status = 0
    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without taking down all that was imported, which is much in pages to be copied, and of which libraries complain.
    os._exit(status)


def die_with_parent() -> None:
    """Has the kernel end this process when its parent does, however that happens."""
    PR_SET_PDEATHSIG = 1
    with suppress(AttributeError):  # of Linux alone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
