"""What dispatchers print while a run goes on: their choices, on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
import torch.distributed as dist

from megatron_moe_opt.planning.costs.gpu_settings import differences

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


def say_other_settings(dispatcher: str, file: object, measured: Mapping[str, object] | None) -> None:
    """On a GPU, a line on rank 0 where a profile or plan was measured with other settings than this run has."""
    line = differences(file, measured) if torch.cuda.is_available() else None
    if line is not None:
        say_once(dispatcher, line, lambda: line)
