"""Times what benchmarks compare, in turn, so that a slow moment of the machine hits all sides."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of the repetitions and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Summarises at least two measurements."""
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high)


def time_once(action: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, its result freed afterwards."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        torch.cuda._sleep(2_000_000)  # about 1 ms: the host queues everything behind it, so launches are not timed
        start.record()
        result = action()
        end.record()
        torch.cuda.synchronize(device)
        del result
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    result = action()
    elapsed = time.perf_counter() - begin
    del result
    return elapsed


def time_in_turn(sides: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, Timing]:
    """`repeats` (at least 2) rounds, each of which calls every side once, after two that are not timed."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats + 2):
        for side, action in sides.items():
            elapsed = time_once(action, device)
            if repeat >= 2:
                seconds[side].append(elapsed)
    return {side: Timing.of(values) for side, values in seconds.items()}
