"""Dispatchers of a rank on streams in software: the stream executor in the place of the threads.

Ops do what they do on a CPU, when an adversary lets them. An exchange is left running on a stream of its process group,
as NCCL does it, and moves its rows over Gloo on a thread of its own. The host goes on when the caller's stream does: by
then every op must have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe_opt.runtime.engine import executor, steps
from megatron_moe_opt.runtime.engine.executor import Executor
from tests.accelerator.executor_library import SoftwareExecutor, Work
from tests.accelerator.makespans import LANES
from tests.accelerator.software import CALLER, Adversary, Device, Queues


@dataclass(frozen=True)
class ExchangeIn:
    """The extension's exchange, which does not tell its group."""

    action: Any
    group: dist.ProcessGroup

    def run(self) -> None:
        """Runs the exchange as the extension's does."""
        self.action.run()


class Extension:
    """The extension; its exchanges know their group."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extension, name)

    def exchange(self, group: dist.ProcessGroup, *arguments: Any) -> ExchangeIn:
        """Makes an exchange as the extension does."""
        return ExchangeIn(self._extension.exchange(group, *arguments), group)


class Runner:
    """Replaces the extension's executors."""

    def __init__(self, library: Path, seed: int, queues: Queues) -> None:
        self._executor, self._seed, self._queues = SoftwareExecutor(library, len(LANES)), seed, queues
        self.runs = 0

    def run(
        self, ops: Sequence[tuple[int, Sequence[int], Sequence[Any], int]], caller_lane: int, record: bool
    ) -> tuple[tuple[int, int, str] | None, list[tuple[float, float]]]:
        """Runs ops as StreamExecutor.run of the extension does."""
        device = Device(self._queues)
        adversary = Adversary(device, 1_000_003 * self._seed + self.runs * dist.get_world_size() + dist.get_rank())
        self.runs += 1
        works = [
            (lane, waits_for, [self._work(action, index, meanwhile) for action in actions], meanwhile)
            for index, (lane, waits_for, actions, meanwhile) in enumerate(ops)
        ]
        failure, times = self._executor.issue(device, works, caller_lane, record, adversary)
        assert failure is None, failure
        adversary.run_until(device.launch(CALLER, label="what comes after"))
        left = [str(entry) for entry in device.entries if not entry.ended and entry.run is not None]
        assert not left, f"nobody waited for {', '.join(left)}"
        return None, times

    def issue_meanwhile(self) -> None:
        """Does nothing: an action runs when the adversary lets it, and that may be after all has been issued."""

    def _work(self, action: Any, op: int, meanwhile: int) -> Callable[[], Work]:
        work = Work(
            action.run,
            seconds=1e-6,  # of virtual time: who records asks how long it took
            group=id(action.group) if isinstance(action, ExchangeIn) else None,
            blocks=isinstance(action, ExchangeIn),
            label=f"op {op}",
        )

        def begin() -> Work:
            if meanwhile and (self.runs + op + dist.get_rank()) % 2:  # before all that the op does; else behind it
                self._executor.issue_meanwhile()
            return work

        return begin


def _as_real(bound: steps.Steps) -> steps.Steps:
    """Returns steps for a thread of the extension's, in which runs what was started."""
    return replace(bound, actions=tuple(getattr(action, "action", action) for action in bound.actions))


@contextmanager
def software_streams(library: Path, seed: int, queues: Queues) -> Iterator[Runner]:
    """Has schedules run on streams in software inside the context."""
    software = Executor.__new__(Executor)
    software._on_streams, software._runner = True, Runner(library, seed, queues)
    software._device = torch.device("cpu")
    software.start = lambda schedule, bound, *queue: Executor.start(
        software, schedule, list(map(_as_real, bound)), *queue
    )
    before = executor._executor, steps._C
    executor._executor, steps._C = lambda *_: software, Extension(steps._C)
    try:
        yield software._runner
    finally:
        executor._executor, steps._C = before
