"""How all ranks of a job learn which rank failed first, and where: through the job's store, not by waiting for it.

The first rank that fails writes what happened under one key, where nobody replaces it. Every rank has a thread that
looks at the store: it says the sentence, interrupts the collectives that wait for the failed rank, and ends a process
that waits where it cannot be interrupted. A rank that was killed or stopped writes nothing; who finds a connection
closed, or waits longer than its group's timeout, calls the roll, and writes who did not answer.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from megatron_moe_opt.errors import ConfigurationError, LayerError, RoutingError, printable, reason
from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.runtime.job.job_store import connect_to_job_store, may_be_restarted, of_this_attempt
from megatron_moe_opt.runtime.observed.layer_place import describe_place, is_beside

POLL_S = 0.2
POLLS_PER_S = 5000
"""How often a second all ranks together may ask the store, which other things of the job go through, too."""
ROLL_CALL_S = 1.5
"""How long a live rank may take to answer."""
STORE_S = 3.0
"""How long the store may take to answer."""
SEEN_S = 1.0
"""How long a rank that failed waits for the others to read it, before it raises an error and maybe ends."""
GRACE_S = 1.5
"""How long a rank may wait in a collective after another one has failed."""
END_S = 30.0
"""How long a rank that has raised an error may take to end, as torchrun gives."""
NAMED = 8
"""The most ranks that do not answer, besides the first, that are named."""

_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""The texts of errors of a connection whose other end is closed."""

_ALARM, _FIRST, _SEEN, _CALLER, _END = "alarm", "first", "seen", "caller", b"end"


@dataclass(frozen=True)
class Failure:
    """A failure in a job, as the first rank that failed has written it, or another rank about it."""

    rank: int
    host: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}) failed first, {self.where}: {self.what}"


class FailureBoard:
    """This rank's part in telling all ranks of a job of the first failure."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        served_by_rank: int | None = None,
        restarts: bool = False,
    ) -> None:
        """
        Args:
            served_by_rank: the rank whose process holds the store; None where the launcher does.
            restarts: the store may hold what an attempt before this one has written.
        """
        self.rank, self.first = rank, None
        self._store, self._world, self._served_by_rank = store, world, served_by_rank
        self._poll_s = max(POLL_S, world / POLLS_PER_S)
        self.is_up = not restarts
        """Whether all ranks are known to watch; until then each speaks for itself."""
        self._known = threading.Lock()
        self._raised, self._stopped = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="failure board", daemon=True)
        self._watcher.start()

    def report(self, what: str) -> Failure:
        """Reports that this rank has failed. Returns the job's first failure: this one,
        unless another was before it.
        """
        where = describe_place()
        return self._settle(lambda: self._claim(self.rank, what, where), what, where)

    def notice(self, what: str, peer: int | None = None) -> Failure:
        """Reports that a collective of this rank has failed, for which another rank is to blame. Returns the job's
        first failure.

        Args:
            peer: the rank that this one has lost, where that is known.
        """
        where = describe_place()
        return self._settle(lambda: self._read() or self._blame(what, peer, where), what, where)

    def hears_of_it(self) -> None:
        """Notes an error of the calling thread. Unless it works beside the passes, the process is about to end."""
        if not is_beside():
            self._raised.set()

    def end(self) -> None:
        """Ends the watch with the process. After a failure nothing waits for lanes and groups,
        which may wait for ever.
        """
        self._stopped.set()
        _extension().let_end()
        if self.first is not None:
            self._exit()
        self._watcher.join(STORE_S)
        if self._served_by_rank == self.rank:
            time.sleep(2 * self._poll_s)  # until the others know: they must not look for a store that is gone

    def _settle(self, find: Callable[[], Failure], what: str, where: str) -> Failure:
        self.hears_of_it()
        if self.first is None:
            found: list[Failure] = []
            if not self._answered(lambda: found.append(find())):
                # A launcher's store is on the node of rank 0.
                serves = "the launcher beside it serves" if self._served_by_rank is None else "it serves"
                what = f"{serves} the job's store, which is gone, as rank {self.rank} found: {what}"
                found = [Failure(self._served_by_rank or 0, os.environ.get("MASTER_ADDR", "unknown"), where, what)]
            self._say(found[0])
        return self.first

    def _claim(self, rank: int, what: str, where: str) -> Failure:
        """Writes that a rank has failed, unless one is written already; waits until the other ranks have read it."""
        host = socket.gethostname() if rank == self.rank else self._host_of(rank)
        mine = json.dumps(asdict(Failure(rank, host, where, printable(what))))
        first = Failure(**json.loads(self._store.compare_set(_FIRST, "", mine)))
        self._store.set(_ALARM, "")
        self._say(first)
        self._wait_until_seen(self._world - (rank != self.rank))  # who does not answer reads nothing
        return first

    def _wait_until_seen(self, by: int) -> None:
        deadline = time.monotonic() + SEEN_S + self._poll_s
        while self._store.add(_SEEN, 0) < by and time.monotonic() < deadline:
            time.sleep(self._poll_s / 10)

    def _blame(self, what: str, peer: int | None, where: str) -> Failure:
        if peer is not None and any(sign in what for sign in _GONE):
            # Who fails otherwise writes before it ends; and torchrun, which has seen the end too, ends this rank soon.
            return self._claim(peer, f"its process has ended, as rank {self.rank} found: {what}", where)
        silent = self._call_roll()
        if (first := self._read()) is not None:
            return first
        if not silent:
            if peer is None:
                return self._claim(self.rank, what, where)
            return self._claim(peer, f"rank {self.rank} has lost it, though its process runs: {what}", where)
        rank = peer if peer in silent else silent[0]
        others = [other for other in silent if other != rank]
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        named = ", ".join(map(str, others[:NAMED])) + more
        nor = f", nor {'do ranks' if len(others) > 1 else 'does rank'} {named}" if others else ""
        return self._claim(rank, f"it does not answer any more{nor}, as rank {self.rank} found: {what}", where)

    def _call_roll(self) -> list[int]:
        """Returns the ranks that do not answer; none where a failure is written meanwhile."""
        if self._store.check([_ALARM]) and self._store.get(_ALARM) == _END:
            return []
        self._store.set(_here(self.rank), "")  # its watcher may be what has died
        self._store.set(_ALARM, "")
        deadline = time.monotonic() + ROLL_CALL_S + self._poll_s
        caller = int(self._store.compare_set(_CALLER, "", str(self.rank)))
        while caller != self.rank and time.monotonic() < deadline:  # one asks for all ranks, whose store is one process
            if self._store.check([_FIRST]):
                return []
            time.sleep(self._poll_s / 4)
        deadline = max(deadline, time.monotonic() + self._poll_s)
        others = {_here(rank): rank for rank in range(self._world) if rank != self.rank}
        while not self._store.check(list(others)):
            if time.monotonic() > deadline:
                return [rank for key, rank in others.items() if not self._store.check([key])]
            if self._store.check([_FIRST]):
                break
            time.sleep(self._poll_s / 4)
        return []

    def _read(self) -> Failure | None:
        return Failure(**json.loads(self._store.get(_FIRST))) if self._store.check([_FIRST]) else None

    def _host_of(self, rank: int) -> str:
        return self._store.get(_host(rank)).decode() if self._store.check([_host(rank)]) else "unknown"

    def _answered(self, ask: Callable[[], object]) -> bool:
        """Whether the store has answered: the process that serves it may be gone, or stopped."""
        answered: list[bool] = []

        def run() -> None:
            try:
                ask()
                answered.append(True)
            except RuntimeError:
                pass

        asking = threading.Thread(target=run, daemon=True)
        with suppress(RuntimeError):  # early CPython 3.12 starts no thread in a process that ends
            asking.start()
            asking.join(STORE_S + ROLL_CALL_S)
        return bool(answered)

    def _say(self, first: Failure) -> None:
        with self._known:
            if self.first is None:
                self.first = first
                print(f"moe-opt: error: {first}", file=sys.stderr, flush=True)

    def _watch(self) -> None:
        try:
            if not self.is_up:
                ours = of_this_attempt(self._store, self.rank, self._world, lambda: self._rest(self._poll_s))
                if ours is None:
                    return
                self._store, self.is_up = ours, True
            self._store.set(_host(self.rank), socket.gethostname())
            while not self._store.check([_ALARM]):
                if self._rest(self._poll_s):
                    return
            if self._store.get(_ALARM) == _END:
                return
            self._store.set(_here(self.rank), "")
            while (first := self._read()) is None:
                if self._rest(self._poll_s / 4):
                    return
            self._say(first)
            self._store.add(_SEEN, 1)
        except RuntimeError:
            return  # the store is gone: at the end of the job, or a collective with who served it fails
        with suppress(RuntimeError):  # as in `_answered`
            threading.Thread(target=_abort_nccl, daemon=True).start()
        deadline = time.monotonic() + GRACE_S
        while not self._raised.wait(POLL_S / 4) and time.monotonic() < deadline:
            for interrupt in _interrupts:
                interrupt()
        if self._raised.is_set():
            self._stopped.wait(END_S)
        if not self._stopped.is_set():
            self._exit()

    def _rest(self, seconds: float) -> bool:
        """Waits. Returns whether there is no more to watch for, which the rank that serves the store tells the others;
        ends a process of which a thread has died.
        """
        if what := _extension().uncaught_exception():
            line = f"a thread has died of {what.splitlines()[0]}"
            # NCCL's watchdog dies of a collective that did not end, for which another rank may be to blame.
            if self.is_up:
                self.notice(line) if "NCCL" in what else self.report(line)
            else:
                print(f"moe-opt: error: rank {self.rank}: {line}", file=sys.stderr, flush=True)
            if what.startswith("SIGABRT"):  # whose other handlers may say where it was, or a core is written
                _extension().let_end()
                time.sleep(GRACE_S)
            self._exit()
        is_over = self._stopped.wait(seconds)
        if is_over and self.first is None and self._served_by_rank == self.rank:
            self._store.set(_ALARM, _END)
        return is_over

    def _exit(self) -> None:
        if self._served_by_rank == self.rank:
            self._answered(lambda: self._wait_until_seen(self._world))
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(1)


_extension = functools.cache(load_extension)
"""Returns the extension. Importing this module does not load it: who starts a job says in one sentence, with what is
here, that it is missing or stale.
"""


def _host(rank: int) -> str:
    return f"host/{rank}"


def _here(rank: int) -> str:
    return f"here/{rank}"


_interrupts: list[Callable[[], None]] = []


def interrupted_by(interrupt: Callable[[], None]) -> None:
    """Has `interrupt` called, in another thread, when a rank has failed: again and again until this one has raised."""
    _interrupts.append(interrupt)


def _abort_nccl() -> None:
    """Aborts NCCL's groups alone, the last made first, none of them behind another: one may wait for its ranks.

    From PyTorch 2.15 on those that were split off one another take turns all the same. Gloo's abort ends nothing that
    waits: there sends and receives are interrupted, and other collectives are not.
    """
    pg_map = dist.distributed_c10d._world.pg_map
    for group in [group for group in reversed(list(pg_map)) if "nccl" in dist.get_backend(group)]:
        threading.Thread(target=group.abort, daemon=True).start()


_board: FailureBoard | None = None


def start() -> None:
    """Begins to watch, in a job of several ranks that the environment names. All ranks call it, any number of times."""
    global _board
    if _board is not None or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = connect_to_job_store("failures")
    if store is not None:
        _extension().keep_uncaught_exceptions()
        of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        server, restarts = (None, may_be_restarted()) if of_launcher else (0, False)
        _board = FailureBoard(store, dist.get_rank(), dist.get_world_size(), server, restarts)
        atexit.register(_end)
        sys.excepthook = _reporting(sys.excepthook)


def _end() -> None:
    if _board is not None:
        _board.end()


def _forget() -> None:
    global _board
    _board = None


os.register_at_fork(after_in_child=_forget)  # a forked process is not the rank


def first_failure() -> Failure | None:
    """Returns the first failure of the job, as far as it is known here."""
    return None if _board is None else _board.first


def explain(what: str, is_own: bool, peer: int | None = None) -> str:
    """Returns the sentence that an error raised on this rank says: which rank failed first, and where.

    Args:
        what: has failed here.
        is_own: whether this rank is to blame, or one that it communicates with.
        peer: the rank that this one has lost, where that is known.
    """
    where = describe_place()
    if _board is None or not _board.is_up:
        if _board is not None:
            _board.hears_of_it()
        return f"{where}: {what}" if where.startswith("in ") else what
    first = _board.report(what) if is_own else _board.notice(what, peer)
    if first.rank == _board.rank:
        return str(first)
    return f"{first}; rank {_board.rank} gave up {where}: {what}"


@contextmanager
def told() -> Iterator[None]:
    """Turns errors raised inside into LayerErrors and tells all ranks. Those that say what to
    change stay as they are.
    """
    try:
        yield
    except _StopRecomputationError:
        raise
    except LayerError:
        if _board is not None:
            _board.hears_of_it()
        raise
    except (ConfigurationError, RoutingError) as error:
        explain(str(error), is_own=True)
        raise
    except Exception as error:
        raise LayerError(_explain(error)) from error


def _explain(error: Exception) -> str:
    return explain(f"{type(error).__name__}: {reason(error)}", is_own=not is_of_communication(error))


def is_of_communication(error: BaseException) -> bool:
    """Whether an error is another rank's fault, or the network's."""
    return isinstance(error, dist.DistError) or any(name in str(error) for name in ("/gloo/", "NCCL"))


def _reporting(shown: Callable[..., None]) -> Callable[..., None]:
    """Returns a hook for errors that nobody has caught, with which the process ends: it tells of them first."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if issubclass(kind, Exception) and not isinstance(error, LayerError):
            _explain(error)
        shown(kind, error, trace)

    return hook
