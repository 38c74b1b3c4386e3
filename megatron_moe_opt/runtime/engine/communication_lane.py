"""A lane for collectives beside everything else: they run in the order in which they are submitted.

All ranks submit in the same order, so that a process group that only this lane uses sees one order on all of them.
Who submits collectives reports what they send with traffic.count_sent: a TrafficCounter sees none of them here.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_moe_opt.kernels.streams import has_streams, own_stream
from megatron_moe_opt.planning.costs.gpu_settings import has_one_queue
from megatron_moe_opt.runtime.engine.collectives import Waits
from megatron_moe_opt.runtime.job.failure_board import first_failure, told
from megatron_moe_opt.runtime.job.forks import Pending
from megatron_moe_opt.runtime.observed.layer_place import Place, place, working_beside
from megatron_moe_opt.runtime.observed.stages import Staged, Task
from megatron_moe_opt.runtime.observed.traffic import reported

END_S = 5.0
"""How long the end of the process waits for what a lane has begun."""


class HostLane:
    """A thread. Whatever it waits for, a peer that died does not keep this rank alive: see `end`."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Task, Future, Place | None] | None]
        self._tasks = queue.SimpleQueue()
        self._waits: Waits | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> Callable[[], torch.Tensor]:
        """Queues a task; what is returned waits for its result, or raises what it raised."""
        future: Future[torch.Tensor] = Future()
        pending = Pending(future)
        self._tasks.put((task, future, place()))
        return pending.result

    def finish(self) -> None:
        """Waits until all that was submitted has ended, however it did."""
        self.submit(lambda: torch.empty(0))()

    def advance(self) -> None:
        """Nothing: the thread goes on by itself."""

    def end(self) -> None:
        """Ends the thread, as the process must before it ends: a thread that comes back from a collective when there is
        no interpreter any more would abort the process.

        What peers take part in too is waited for, as they may wait for this rank. The rest is given up.
        """
        self._tasks.put(None)
        self._thread.join(END_S)
        deadline = time.monotonic() + END_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self._waits is not None:
                self._waits.end()
            self._thread.join(0.01)

    def _work(self) -> None:
        self._waits = Waits.here()
        while (entry := self._tasks.get()) is not None:
            task, future, submitted = entry
            try:
                with torch.no_grad(), working_beside(submitted), told():
                    future.set_result(Staged(task).finish())
            except BaseException as error:
                future.set_exception(error)
            del task, future, submitted, entry  # or an idle thread would keep their tensors


@dataclass(eq=False)
class _Begun:
    task: Staged
    done: torch.cuda.Event | None = None
    """Behind all of it, once it is issued."""


class StreamLane:
    """A CUDA stream. Tasks are issued by the caller at once: all ranks issue to all their groups in the same order.

    Where all streams share one hardware queue a task is issued as far as its first collective: what waits for that
    would hold up all that is issued after it. It goes on when it is told to, when the next task is submitted, or when
    its result is wanted; all ranks do these alike.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream(device)
        self._in_stages = has_one_queue()
        self._begun: list[_Begun] = []
        """Tasks that are not all issued."""

    def submit(self, task: Task) -> Callable[[], torch.Tensor]:
        """Issues a task behind what is queued on the current stream; what is returned makes that stream wait."""
        self._issue_all()
        self._stream.wait_stream(torch.cuda.current_stream())
        with self._issuing():
            begun = _Begun(Staged(task))
        self._begun.append(begun)
        if not self._in_stages:
            self._issue_all()

        def wait() -> torch.Tensor:
            if begun.done is None:
                self._issue_all()
            stream = torch.cuda.current_stream()
            stream.wait_event(begun.done)
            begun.task.result.record_stream(stream)
            return begun.task.result

        return wait

    def advance(self) -> None:
        """Has tasks that wait for a collective wait on the stream, and issue what comes after it."""
        for begun in self._begun:
            with self._issuing():
                begun.task.advance()
                if begun.task.result is not None:
                    begun.done = self._stream.record_event()
        self._begun = [begun for begun in self._begun if begun.task.result is None]

    def finish(self) -> None:
        """Waits until all that was submitted has ended."""
        self._issue_all()
        self._stream.synchronize()

    def _issue_all(self) -> None:
        while self._begun:
            self.advance()

    @contextmanager
    def _issuing(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream), torch.no_grad(), reported():  # in the caller's thread, which is counted
            yield

    def end(self) -> None:
        """Nothing runs on the host."""


_lanes: dict[tuple[str, torch.device], HostLane | StreamLane] = {}
os.register_at_fork(after_in_child=_lanes.clear)


def _end_lanes() -> None:
    if first_failure() is None:  # after a failure the process ends without waiting for its threads
        for lane in _lanes.values():
            lane.end()


def communication_lane(name: str, device: torch.device) -> HostLane | StreamLane:
    """The lane of this name of this process, for tensors on `device`; made when it is first needed."""
    if not _lanes:
        atexit.register(_end_lanes)  # while it can still be told that a peer has failed: before the failure board ends
    if (name, device) not in _lanes:
        _lanes[name, device] = StreamLane(device) if has_streams(device) else HostLane(name)
    return _lanes[name, device]


def finish_lanes() -> None:
    """Waits until all that was submitted to the lanes of this process has ended."""
    for lane in _lanes.values():
        lane.finish()


def advance_lanes() -> None:
    """Issues what is next in lanes that share one hardware queue with everything else: where the caller has queued what
    takes about as long as a collective since it was issued.
    """
    for lane in _lanes.values():
        lane.advance()
