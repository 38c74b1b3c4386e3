"""Seconds of something on the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def slowest(seconds: Sequence[float] | torch.Tensor, device: torch.device) -> list[Any]:
    """Returns the largest of all ranks of each number, which may be in rows. A collective call over the world."""
    times = torch.as_tensor(seconds, dtype=torch.float64).to(device).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds from calling `run` until the work that it issued on `device` is complete."""
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
