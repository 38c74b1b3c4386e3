"""What dispatchers print while a run goes on: their choices, on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch.distributed as dist

_said: set[tuple[str, Hashable]] = set()


def say(dispatcher: str, line: str) -> None:
    """A line on rank 0."""
    if dist.get_rank() == 0:
        print(f"moe-opt: {dispatcher}: {line}", flush=True)


def say_once(dispatcher: str, choice: Hashable, line: Callable[[], str]) -> None:
    """`line()` on rank 0 when a choice is made for the first time, whichever layer makes it."""
    if (dispatcher, choice) not in _said:
        _said.add((dispatcher, choice))
        say(dispatcher, line())
