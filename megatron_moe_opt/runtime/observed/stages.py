"""Tasks in stages, between which collectives are under way.

A task is a function that returns its result, or a generator that yields each collective as `collectives.start_<op>`
returns it, is sent what it brought, and returns the result:

    def task():
        gathered = yield start_all_gather_rows(rows, None, group)
        return gathered.view(-1)

Whoever runs it decides when each collective is waited for, and so when the next one is issued.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch

from megatron_moe_opt.runtime.engine.collectives import Pending

Stages = Generator[Pending, torch.Tensor, torch.Tensor]
Task = Callable[[], torch.Tensor | Stages]


class Staged:
    """A task on its way."""

    def __init__(self, task: Task) -> None:
        """Runs it as far as its first collective."""
        self.result: torch.Tensor | None = None
        """None until it is done."""
        self._under_way: Pending | None = None
        begun = task()
        if isinstance(begun, Generator):
            self._stages = begun
            self._resume(lambda: begun.send(None))
        else:
            self.result = begun

    def advance(self) -> None:
        """Waits for the collective that is under way, and goes on as far as the next one."""
        if self.result is not None:
            return
        try:
            brought = self._under_way.wait()
        except BaseException as failure:
            error = failure
            self._resume(lambda: self._stages.throw(error))  # where it can be named
        else:
            self._resume(lambda: self._stages.send(brought))

    def finish(self) -> torch.Tensor:
        """Goes on to the end."""
        while self.result is None:
            self.advance()
        return self.result

    def _resume(self, step: Callable[[], Pending]) -> None:
        try:
            self._under_way = step()
        except StopIteration as end:
            self.result, self._under_way = end.value, None
