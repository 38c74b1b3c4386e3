"""Timing of single kernels, each against what is in use today and against a plain copy of the bytes it must move."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_moe_opt.cli.console import report_console, table_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Timing:
    """The seconds that repetitions of one action took: their median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Returns the summary of at least two measurements."""
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, digits: int) -> str:
        """Returns milliseconds: the median, and the quartiles in brackets."""
        median, low, high = (f"{seconds * 1e3:.{digits}f}" for seconds in (self.median, self.low, self.high))
        return f"{median} [{low} {high}]"


@dataclass(frozen=True)
class Row:
    """One operation of one dtype. `stock` is what it is compared with, None where that is not installed."""

    op: str
    dtype: str
    moved_bytes: int  # read once + written once
    ours: Timing
    stock: Timing | None
    floor: Timing  # a plain copy of moved_bytes / 2 bytes

    @property
    def speedup(self) -> float | None:
        """How many times faster ours is: stock's median over ours."""
        return None if self.stock is None else self.stock.median / self.ours.median

    @property
    def over_floor(self) -> float:
        """How far ours is from a plain copy: our median over the copy's."""
        return self.ours.median / self.floor.median

    def report(self) -> dict[str, Any]:
        """Returns the row with its ratios, as the JSON report has it."""
        return asdict(self) | {
            "speedup": self.speedup,
            "over_floor": self.over_floor,
            "bytes_per_second": self.moved_bytes / self.ours.median,
            "floor_bytes_per_second": self.moved_bytes / self.floor.median,
        }


def measure(sides: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, Timing]:
    """Returns what each side takes, timed in turn, so that a slow moment of the machine hits all of them; two more
    rounds warm up.
    """
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats + 2):
        for side, action in sides.items():
            elapsed = time_once(action, device)
            if repeat >= 2:
                seconds[side].append(elapsed)
    return {side: Timing.of(values) for side, values in seconds.items()}


def rows_of(
    ours: Mapping[str, tuple[Callable[[], Any], int]],
    stock: Mapping[str, Callable[[], Any]],
    dtype: str,
    repeats: int,
    device: torch.device,
) -> list[Row]:
    """Returns a row for each operation, ours by name -> (what to time, bytes it must move), stock's by this name."""
    rows = []
    for op, (run, moved_bytes) in ours.items():
        sides = {"ours": run, "floor": plain_copy(moved_bytes // 2, device)}
        sides |= {"stock": stock[op]} if op in stock else {}
        timings = measure(sides, repeats, device)
        rows.append(Row(op, dtype, moved_bytes, timings["ours"], timings.get("stock"), timings["floor"]))
    return rows


def time_once(action: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds of one call, whose result is freed outside of them."""
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


def plain_copy(num_bytes: int, device: torch.device) -> Callable[[], Any]:
    """Returns a copy of num_bytes between warm buffers: memcpy on as many threads as PyTorch has, or a device-to-device
    copy.
    """
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        return lambda: target.copy_(source)
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    bounds = [num_bytes * i // threads for i in range(threads + 1)]

    def copy_part(i: int) -> None:
        begin, end = bounds[i], bounds[i + 1]
        ctypes.memmove(target.data_ptr() + begin, source.data_ptr() + begin, end - begin)  # releases the GIL

    return lambda: list(pool.map(copy_part, range(threads)))


def print_table(title: str, compared: str, rows: list[Row], settings: dict[str, Any]) -> None:
    """Prints a line an operation; times in milliseconds, quartiles in brackets. `stock` names what ours is compared
    with.
    """
    headers = ("op", "dtype", f"{compared} ms", "ours ms", "speed-up", "copy floor ms", "ours / floor", "GB/s")
    table = table_of(title, headers, names=2, caption=", ".join(f"{k} {v}" for k, v in settings.items()))

    for row in rows:
        speedup = "" if row.speedup is None else f"{row.speedup:.2f}x"
        stock, rate = (
            "not installed" if row.stock is None else row.stock.text(2),
            row.moved_bytes / row.ours.median / 1e9,
        )
        ours = row.ours.text(2), speedup, row.floor.text(2), f"{row.over_floor:.2f}", f"{rate:.1f}"
        table.add_row(row.op, row.dtype, stock, *ours)
    report_console(150).print(table)
