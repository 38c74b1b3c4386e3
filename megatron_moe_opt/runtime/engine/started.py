"""Where schedules run that were started: beside everything else, those of a queue in the order in which they came.

All ranks start the same ones in the same order, so that a process group that only one queue uses sees one order on all
of them. What a schedule does comes here as its parts: on a CPU one, which runs all of it; on streams one up to each
collective, which is waited for when the next part begins.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.gpu_settings import launches_in_turn
from megatron_moe_opt.kernels.streams import has_streams, own_stream
from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.runtime.job.forks import Pending
from megatron_moe_opt.runtime.observed.layer_place import Place, place, working_beside

_C = load_extension()

END_S = 5.0
"""How long the end of the process waits for what was started."""

Progress = Iterator[None]
"""An iterator of which each `next` does a part of what a schedule does; the last one ends it."""


class GivenUp(BaseException):
    """Raised where what was started is not waited for, because the process ends. It is no error of anybody's."""


class Running(Protocol):
    """A schedule that was started."""

    def wait(self) -> None:
        """Waits until it has run, on CUDA the current stream does; any number of times. Raises what it raised."""


class HostQueue:
    """Runs what is started in a thread. Whatever that waits for, a dead peer does not keep
    this rank alive: see `end`.
    """

    def __init__(self, name: str) -> None:
        self.runner = _C.Executor(1)
        """The executor with which the thread runs schedules."""
        failure_board.interrupted_by(self.runner.give_up)
        self.is_ending = False
        """Whether what fails from now on was given up."""
        self._entries: queue.SimpleQueue[tuple[Progress, Future[None], Place | None] | None] = queue.SimpleQueue()
        self._last: Future[None] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def memory(self) -> AbstractContextManager[None]:
        """Returns a context in which memory is the queue's: on the host, any memory is."""
        return nullcontext()

    def start(self, parts: Progress) -> Running:
        """Puts a schedule behind those that were started before."""
        self._last = future = Future()
        running = _OnHost(future)
        self._entries.put((parts, future, place()))
        return running

    def finish(self) -> None:
        """Waits until all that was started has ended, however it did."""
        if self._last is not None:
            wait_for([self._last])

    def advance(self) -> None:
        """Does nothing: the thread goes on by itself."""

    def end(self) -> None:
        """Ends the thread, as the process must before it ends: a thread that comes back from a collective when there is
        no interpreter any more would abort the process.

        What peers take part in too is waited for, as they may wait for this rank. The rest is given up.
        """
        self._entries.put(None)
        self._thread.join(END_S)
        self.is_ending = True
        deadline = time.monotonic() + END_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            self.runner.give_up()
            self._thread.join(0.01)

    def _work(self) -> None:
        while (entry := self._entries.get()) is not None:
            parts, future, started = entry
            try:
                with torch.no_grad(), working_beside(started), failure_board.told():
                    for _ in parts:
                        pass
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
            del parts, future, started, entry  # or an idle thread would keep their tensors


class _OnHost:
    def __init__(self, future: Future[None]) -> None:
        self._pending = Pending(future)

    def wait(self) -> None:
        """Blocks until the thread has run it, and raises what it raised."""
        self._pending.result()


class StreamQueue:
    """Runs what is started on a CUDA stream. Schedules are issued by the caller at once: all ranks issue to all their
    groups in the same order.

    Where all streams share one hardware queue, or NCCL keeps the order of launches, what waits for a collective would
    hold up all that is issued after it. So there one collective is issued at a time, the next one when this is told to
    go on, or when it is waited for; all ranks do these alike.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = own_stream(device)
        self._in_turn = launches_in_turn()
        self._left: deque[_OnStream] = deque()
        """The schedules, among those that were started in turn, that are not issued to their end."""

    def memory(self) -> AbstractContextManager[None]:
        """Returns a context in which memory is the queue's."""
        return torch.cuda.stream(self.stream)

    def start(self, parts: Progress, behind: _OnStream | None = None) -> Running:
        """Puts a schedule behind what is queued on the current stream, and behind those that were started before.

        Args:
            behind: what was started in another queue, and whose turn comes first: these parts wait for it.
        """
        running = _OnStream(self, parts, torch.cuda.current_stream().record_event(), behind)
        self._left.append(running)
        if not self._in_turn:
            self.issue(running)
        elif len(self._left) == 1:
            self.advance()
        return running

    def advance(self) -> None:
        """Issues what comes next, as far as a collective: once what was issued before has had time to end."""
        while self._left and self._left[0].is_due():
            running = self._left.popleft()
            if running.issue_part():
                self._left.appendleft(running)
                return

    def issue(self, running: _OnStream) -> None:
        """Issues all of what was started, and of what was started before it."""
        while running in self._left:
            self._left[0].issue_before()
            self.advance()

    def finish(self) -> None:
        """Waits until all that was started has ended."""
        if self._left:
            self.issue(self._left[-1])
        self.stream.synchronize()

    def end(self) -> None:
        """Does nothing: no thread runs on the host."""


class _OnStream:
    def __init__(self, queue: StreamQueue, parts: Progress, after: torch.cuda.Event, behind: _OnStream | None) -> None:
        self._queue, self._behind, self._done, self._failure = queue, behind, None, None
        self._parts: Progress | None = parts
        """What remains to be issued; None: all is issued, and `_done` is behind it; or it has failed."""
        self._after: torch.cuda.Event | None = after
        """An event behind what the caller had queued; None: the first part is behind that already."""

    def is_due(self) -> bool:
        """Whether all is issued of the schedule that this one is behind."""
        return self._behind is None or self._behind._parts is None

    def issue_before(self) -> None:
        """Issues all of the schedule that this one is behind."""
        if self._behind is not None:
            self._behind._queue.issue(self._behind)

    def issue_part(self) -> bool:
        """Issues what comes next on the queue's stream, as far as a collective, and returns True; False: as far as the
        end, or an event to wait for behind it.
        """
        stream = self._queue.stream
        try:
            with torch.cuda.stream(stream), torch.no_grad():
                if self._after is not None:
                    stream.wait_event(self._after)
                    self._after = None
                for _ in self._parts:
                    return True
        except BaseException as error:
            self._parts, self._failure = None, error
            raise
        self._done, self._parts = stream.record_event(), None
        return False

    def wait(self) -> None:
        """Issues all that remains, and lets the current stream wait for it."""
        self._queue.issue(self)
        if self._failure is not None:
            raise self._failure
        torch.cuda.current_stream().wait_event(self._done)


_queues: dict[tuple[str, torch.device], HostQueue | StreamQueue] = {}
os.register_at_fork(after_in_child=_queues.clear)


def _end_queues() -> None:
    if failure_board.first_failure() is None:  # after a failure the process ends without waiting for its threads
        for one in _queues.values():
            one.end()


def started_queue(name: str, device: torch.device) -> HostQueue | StreamQueue:
    """Returns the queue of this name of this process, for tensors on `device`; made when it is first needed."""
    if not _queues:
        atexit.register(_end_queues)  # while it can still be told that a peer has failed: before the failure board ends
    if (name, device) not in _queues:
        _queues[name, device] = StreamQueue(device) if has_streams(device) else HostQueue(name)
    return _queues[name, device]


def finish_started() -> None:
    """Waits until all that was started in this process has ended."""
    for one in _queues.values():
        one.finish()


def advance_started() -> None:
    """Issues the next part of each started schedule where it shares one hardware queue with everything else, and the
    caller has queued what takes about as long as a collective since the last part.
    """
    for one in _queues.values():
        one.advance()
