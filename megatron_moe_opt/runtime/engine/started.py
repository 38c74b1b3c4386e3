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
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from megatron_moe_opt.kernels.extension import load_extension
from megatron_moe_opt.kernels.streams import has_streams, own_stream
from megatron_moe_opt.planning.costs.gpu_settings import has_one_queue
from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.runtime.job.forks import Pending
from megatron_moe_opt.runtime.observed.layer_place import Place, place, working_beside

_C = load_extension()

END_S = 5.0
"""How long the end of the process waits for what was started."""

Parts = Iterator[None]
"""Each `next` does a part of what a schedule does; the last one ends it."""


class GivenUp(BaseException):
    """What was started was not waited for, because the process ends. It is no error of anybody's."""


class Running(Protocol):
    """A schedule that was started."""

    def wait(self) -> None:
        """Waits until it has run, on CUDA the current stream does; any number of times. Raises what it raised."""

    def advance(self) -> None:
        """Issues what comes next, where all streams share one hardware queue; else it goes on by itself."""


class HostQueue:
    """A thread. Whatever it waits for, a peer that died does not keep this rank alive: see `end`."""

    def __init__(self, name: str) -> None:
        self.runner = _C.Executor(1)
        """In which the thread runs schedules."""
        failure_board.interrupted_by(self.runner.give_up)
        self.is_ending = False
        """Whether what fails from now on was given up."""
        self._entries: queue.SimpleQueue[tuple[Parts, Future[None], Place | None] | None] = queue.SimpleQueue()
        self._last: Future[None] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def memory(self) -> AbstractContextManager[None]:
        """A context in which memory is the queue's."""
        return nullcontext()

    def start(self, parts: Parts) -> Running:
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
        """Nothing: the thread goes on by itself."""

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

    def advance(self) -> None:
        """Does nothing, as the thread goes on by itself."""


class StreamQueue:
    """A CUDA stream. Schedules are issued by the caller at once: all ranks issue to all their groups in the same order.

    Where all streams share one hardware queue a schedule is issued as far as its first collective: what waits for that
    would hold up all that is issued after it. It goes on when it is told to, when the next one is started, or when it
    is waited for; all ranks do these alike.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = own_stream(device)
        self._in_parts = has_one_queue()
        self._last: _OnStream | None = None

    def memory(self) -> AbstractContextManager[None]:
        """A context in which memory is the queue's."""
        return torch.cuda.stream(self.stream)

    def start(self, parts: Parts) -> Running:
        """Issues a schedule behind what is queued on the current stream, and behind those that were started before."""
        if self._last is not None:
            self._last.issue_all()
        self.stream.wait_stream(torch.cuda.current_stream())
        self._last = _OnStream(self.stream, parts)
        self._last.advance()
        if not self._in_parts:
            self._last.issue_all()
        return self._last

    def advance(self) -> None:
        """See Running: of the one that was started last."""
        if self._last is not None:
            self._last.advance()

    def finish(self) -> None:
        """Waits until all that was started has ended."""
        if self._last is not None:
            self._last.issue_all()
        self.stream.synchronize()

    def end(self) -> None:
        """Nothing runs on the host."""


class _OnStream:
    def __init__(self, stream: torch.cuda.Stream, parts: Parts) -> None:
        self._stream, self._done = stream, None
        self._parts: Parts | None = parts
        """None: all is issued, and `_done` is behind it; or it has failed."""
        self._failure: BaseException | None = None

    def advance(self) -> None:
        """Issues the next part on the queue's stream; behind the last one, an event to wait for."""
        if self._parts is None:
            return
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                for _ in self._parts:
                    return
        except BaseException as error:
            self._parts, self._failure = None, error
            raise
        self._done, self._parts = self._stream.record_event(), None

    def issue_all(self) -> None:
        """Goes on to the end."""
        while self._parts is not None:
            self.advance()

    def wait(self) -> None:
        """Issues all that remains, and lets the current stream wait for it."""
        self.issue_all()
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
    """The queue of this name of this process, for tensors on `device`; made when it is first needed."""
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
    """Issues what is next of what was started, where it shares one hardware queue with everything else: where the
    caller has queued what takes about as long as a collective since it was issued.
    """
    for one in _queues.values():
        one.advance()
