"""`moe-opt bench kernels`: permute and unpermute against Megatron-Core's unfused ones and against plain copies; the
placement of samples, see `bench_placement`.

Both sides run through autograd, alternate in one process, and find their memory warm: on CPU malloc is told to keep
what is freed, because page faults would otherwise cost Megatron-Core several times its own work. The floor of an
operation is a plain copy that reads and writes as many bytes as the operation must at least: each row read once and
written once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_moe_opt.cli.bench_placement import measure_placement, print_placement
from megatron_moe_opt.cli.option_types import Device, check_device
from megatron_moe_opt.cli.output_files import check_output
from megatron_moe_opt.cli.timing import Timing, time_in_turn
from megatron_moe_opt.errors import ConfigurationError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Row:
    """One operation of one dtype. `stock` is None where megatron-core is not installed."""

    op: str
    dtype: str
    moved_bytes: int  # read once + written once
    ours: Timing
    stock: Timing | None
    floor: Timing  # a plain copy of moved_bytes / 2 bytes

    @property
    def speedup(self) -> float | None:
        """Stock's median over ours."""
        return None if self.stock is None else self.stock.median / self.ours.median

    @property
    def over_floor(self) -> float:
        """Our median over the copy's."""
        return self.ours.median / self.floor.median


def bench_kernels(
    device: Device = Device.cpu,
    tokens: int = 4096,
    hidden: int = 4096,
    experts: int = 64,
    topk: int = 8,
    dtypes: str = "fp32,bf16",
    repeats: int = 9,
    seed: int = 1234,
    json_path: Path | None = None,
) -> list[Row]:
    """Measures every operation, prints two tables, and writes the rows as JSON where a path is given.

    Args:
        device: where to run.
        tokens: T. hidden: H. experts: E. topk: experts of each token, chosen at random.
        dtypes: names out of fp32, bf16, fp16, separated by commas.
        repeats: measurements of each side (at least 2).
        seed: of the routing and the data.
        json_path: where to write the rows.

    Returns:
        The rows of permute and unpermute.

    Raises:
        ConfigurationError: an unknown dtype, topk above experts, fewer than two repeats, a device that is not there, or
            a path that cannot be written to.
    """
    names = dtypes.split(",")
    unknown = [name for name in names if name not in DTYPES]
    if unknown:
        raise ConfigurationError(f"--dtypes {unknown[0]} is unknown: use {', '.join(DTYPES)}")
    if topk > experts:
        raise ConfigurationError(f"--topk {topk} is above --experts {experts}")
    if repeats < 2:
        raise ConfigurationError(f"--repeats {repeats} is too few: a spread needs at least 2")
    check_device(device)
    check_output("--json", json_path)
    if device is Device.cpu:
        keep_freed_memory()
    rows = []
    for name in names:
        workload = Workload(torch.device(device.value), tokens, hidden, experts, topk, name, seed)
        rows += workload.measure(repeats)
    settings = {"device": device_name(device), "tokens": tokens, "hidden": hidden, "experts": experts, "topk": topk}
    settings |= {"repeats": repeats, "seed": seed, "torch": torch.__version__, "threads": torch.get_num_threads()}
    print_table(rows, settings)
    placement = measure_placement(torch.device(device.value), repeats, seed)
    print_placement(placement)
    if json_path is not None:
        report = {"settings": settings, "rows": [asdict(r) | derived(r) for r in rows]}
        report["placement"] = [asdict(r) | {"speedup": r.speedup} for r in placement]
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return rows


class Workload:
    """Data, operations and byte counts of one configuration."""

    def __init__(
        self, device: torch.device, tokens: int, hidden: int, experts: int, topk: int, dtype: str, seed: int
    ) -> None:
        from megatron_moe_opt import kernels

        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(tokens, experts, generator=generator).topk(topk).indices
        routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
        probs = torch.rand(tokens, experts, generator=generator) * routing_map
        self.device = device
        self.dtype = dtype
        self.shape = (tokens, hidden)
        self.num_rows = tokens * topk
        self.routing_map = routing_map.to(device)
        self.probs = probs.to(device).requires_grad_()
        self.tokens = self._random(generator, tokens).requires_grad_()
        self.permuted = self._random(generator, self.num_rows).requires_grad_()
        self.grad_tokens = self._random(generator, tokens)
        self.grad_permuted = self._random(generator, self.num_rows)
        self.sorted_indices = kernels.permute(self.tokens, self.routing_map, num_out_tokens=self.num_rows)[2]
        self.token_bytes = self.tokens.nbytes
        self.permuted_bytes = self.permuted.nbytes

    def _random(self, generator: torch.Generator, rows: int) -> torch.Tensor:
        data = torch.randn(rows, self.shape[1], generator=generator)
        return data.to(device=self.device, dtype=DTYPES[self.dtype])

    def operations(self, library: Any) -> dict[str, tuple[Callable[[], Any], int]]:
        """Name -> (what to time, bytes it must move) for a library with Megatron-Core's permute and unpermute."""
        once = self.token_bytes + self.permuted_bytes

        def permute() -> Any:
            return library.permute(self.tokens, self.routing_map, self.probs, num_out_tokens=self.num_rows)

        def unpermute(permuted: torch.Tensor, with_probs: bool) -> torch.Tensor:
            weights = (self.probs, self.routing_map) if with_probs else (None, None)
            return library.unpermute(permuted, self.sorted_indices, self.shape, *weights)

        def backward_of(output: torch.Tensor, inputs: list[torch.Tensor], grad: torch.Tensor) -> Callable[[], Any]:
            return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)

        def round_trip(with_probs: bool) -> Callable[[], Any]:
            inputs = [self.tokens, self.probs] if with_probs else [self.tokens]

            def run() -> Any:
                permuted = library.permute(self.tokens, self.routing_map, num_out_tokens=self.num_rows)[0]
                return torch.autograd.grad(unpermute(permuted, with_probs), inputs, self.grad_tokens)

            return run

        with_probs_inputs = [self.permuted, self.probs]
        weighted_backward = once + self.permuted_bytes
        return {
            "permute": (permute, once),
            "permute backward": (backward_of(permute()[0], [self.tokens], self.grad_permuted), once),
            "unpermute": (lambda: unpermute(self.permuted, False), once),
            "unpermute backward": (
                backward_of(unpermute(self.permuted, False), [self.permuted], self.grad_tokens),
                once,
            ),
            "unpermute with probs": (lambda: unpermute(self.permuted, True), once),
            "unpermute with probs backward": (
                backward_of(unpermute(self.permuted, True), with_probs_inputs, self.grad_tokens),
                weighted_backward,
            ),
            "round trip": (round_trip(False), 4 * once),
            "round trip with probs": (round_trip(True), 3 * once + weighted_backward),
        }

    def measure(self, repeats: int) -> list[Row]:
        """Times stock, ours and the copy."""
        from megatron_moe_opt import kernels

        ours = self.operations(kernels)
        stock_library = megatron_moe_utils()
        stock = None if stock_library is None else self.operations(stock_library)
        rows = []
        for op, (run, moved_bytes) in ours.items():
            sides = {"ours": run, "floor": plain_copy(moved_bytes // 2, self.device)}
            if stock is not None:
                sides["stock"] = stock[op][0]
            timings = time_in_turn(sides, repeats, self.device)
            rows.append(Row(op, self.dtype, moved_bytes, timings["ours"], timings.get("stock"), timings["floor"]))
        return rows


def plain_copy(num_bytes: int, device: torch.device) -> Callable[[], Any]:
    """Copies num_bytes between warm buffers: memcpy on as many threads as PyTorch has, or a device-to-device copy."""
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


def keep_freed_memory() -> None:
    """Makes glibc's malloc serve everything from its heap and never shrink that; without glibc, does nothing."""
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)  # -1: never


def megatron_moe_utils() -> ModuleType | None:
    """The module with Megatron-Core's permute and unpermute, or None where it is not installed."""
    try:
        from megatron.core.transformer.moe import moe_utils
    except ImportError:
        return None
    return moe_utils


def device_name(device: Device) -> str:
    """The GPU's name, or the CPU kernels in use."""
    if device is Device.cuda:
        return torch.cuda.get_device_name()
    from megatron_moe_opt import kernels

    return f"cpu ({kernels.build_info()['cpu_kernels']})"


def derived(row: Row) -> dict[str, float | None]:
    """The ratios of a row, for the JSON report."""
    return {
        "speedup": row.speedup,
        "over_floor": row.over_floor,
        "bytes_per_second": row.moved_bytes / row.ours.median,
        "floor_bytes_per_second": row.moved_bytes / row.floor.median,
    }


def print_table(rows: list[Row], settings: dict[str, Any]) -> None:
    """One line an operation; times in milliseconds, quartiles in brackets."""
    table = Table(title="permute / unpermute", caption=", ".join(f"{k} {v}" for k, v in settings.items()))
    for heading in ("op", "dtype", "Megatron-Core ms", "ours ms", "speed-up", "copy floor ms", "ours / floor", "GB/s"):
        table.add_column(heading, justify="left" if heading in ("op", "dtype") else "right", no_wrap=True)

    def show(timing: Timing | None) -> str:
        if timing is None:
            return "not installed"
        return f"{timing.median * 1e3:.2f} [{timing.low * 1e3:.2f} {timing.high * 1e3:.2f}]"

    for row in rows:
        speedup = "" if row.speedup is None else f"{row.speedup:.2f}x"
        rate = f"{row.moved_bytes / row.ours.median / 1e9:.1f}"
        table.add_row(
            row.op, row.dtype, show(row.stock), show(row.ours), speedup, show(row.floor), f"{row.over_floor:.2f}", rate
        )
    Console(width=150).print(table)
