"""Kernels against what is in use today: permute and unpermute against Megatron-Core's, which are Transformer Engine's
where that is installed beside a GPU, as the table says; rows in wire formats against the same in the rows' dtype;
copies of tokens that hop against PyTorch's index_select; the residual codec against PyTorch's operations; all against
plain copies; and placing samples, see placement.py.

All sides alternate in one process and find their memory warm: on CPU malloc is told to keep what is freed, because page
faults would otherwise cost Megatron-Core several times its own work. Permute and unpermute run through autograd. The
floor of an operation is a plain copy that reads and writes as many bytes as the operation must at least: each row read
once and written once.

python -m tools.bench.kernels --tokens 4096 --hidden 4096 --experts 64 --topk 8
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer

from megatron_moe_opt.cli.main import main
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import check_output_file, write_text_whole
from tools.bench.devices import Device, check_device
from tools.bench.placement import measure_placement, print_placement
from tools.bench.timing import DTYPES, Row, print_table, rows_of

app = typer.Typer(pretty_exceptions_enable=False)

FUSED = "Transformer Engine"
LEARNING_RATE = 1e-4


@app.command()
def bench_kernels(
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.cpu,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 4096,
    experts: Annotated[int, typer.Option(min=1, help="Experts.")] = 64,
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token.")] = 8,
    elements: Annotated[int, typer.Option(min=1, help="Elements of the residual codec's expert.")] = 8 * 2**20,
    keep_one_in: Annotated[int, typer.Option(min=1, help="Elements of the expert for each one that is kept.")] = 50,
    dtypes: Annotated[str, typer.Option(help="Of fp32, bf16 and fp16, separated by commas.")] = "fp32,bf16",
    repeats: Annotated[int, typer.Option(min=2, help="Timed repetitions of each operation.")] = 9,
    seed: Annotated[int, typer.Option(help="Seed of rows and routing.")] = 1234,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the rows to this file too.")] = None,
    at_least: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Share of a plain copy's bandwidth for permute, unpermute and their backward passes: fail below.",
        ),
    ] = None,
) -> None:
    """Permute and unpermute against Megatron-Core's, the residual codec against PyTorch's operations, both
    against plain copies; placing samples against scipy and PyTorch, at fixed sizes. In one process.
    """
    names = dtypes.split(",")
    unknown = [name for name in names if name not in DTYPES]
    if unknown:
        raise ConfigurationError(f"--dtypes {unknown[0]} is unknown: use {', '.join(DTYPES)}")
    if topk > experts:
        raise ConfigurationError(f"--topk {topk} is above --experts {experts}")
    check_device(device)
    check_output_file("--output", output)
    if device is Device.cpu:
        keep_freed_memory()
    where = torch.device(device.value)
    permute_rows: list[Row] = []
    wire_rows: list[Row] = []
    hop_rows: list[Row] = []
    codec_rows: list[Row] = []
    for name in names:
        workload = Workload(where, tokens, hidden, experts, topk, name, seed)
        permute_rows += workload.measure(repeats)
        wire_rows += workload.measure_wire(repeats)
        hop_rows += workload.measure_hops(repeats)
        codec_rows += CodecWorkload(where, elements, elements // keep_one_in, name, seed).measure(repeats)
        if DTYPES[name].itemsize == 2:
            stepped = CodecWorkload(where, elements, elements // keep_one_in, name, seed, LEARNING_RATE)
            codec_rows += stepped.measure(repeats)
    name_of_stock, _ = stock_permute(where)
    common = {"device": device_name(device), "repeats": repeats, "seed": seed, "stock": name_of_stock}
    common |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    permute_settings = {"tokens": tokens, "hidden": hidden, "experts": experts, "topk": topk}
    codec_settings = {"elements": elements, "kept": elements // keep_one_in}
    print_table("permute / unpermute", name_of_stock, permute_rows, permute_settings | common)
    print_table("rows in wire formats", "without", wire_rows, permute_settings | common)
    print_table("tokens that hop", "index_select", hop_rows, permute_settings | common)
    print_table("residual codec", "PyTorch", codec_rows, codec_settings | common)
    rows = permute_rows + wire_rows + hop_rows + codec_rows
    placement = measure_placement(where, repeats, seed)
    print_placement(placement)
    if output is not None:
        settings = permute_settings | codec_settings | common
        report = {"settings": settings, "rows": [row.report() for row in rows]}
        report["placement"] = [asdict(row) | {"speedup": row.speedup} for row in placement]
        write_text_whole(output, json.dumps(report, indent=2) + "\n")
    if at_least is not None and not reaches(permute_rows, at_least):
        raise typer.Exit(1)


def reaches(rows: Sequence[Row], at_least: float) -> bool:
    """Prints whether each of permute's and unpermute's rows reaches this share of a plain copy's bandwidth, and by how
    much those that do not miss it. Round trips are made of the others.
    """
    of_copy = {f"{row.op}, {row.dtype}": 1 / row.over_floor for row in rows if not row.op.startswith("round trip")}
    below = [f"{name} at {share:.1%}" for name, share in of_copy.items() if share < at_least]
    said = f"missed: {'; '.join(below)}" if below else f"met, at worst {min(of_copy.values()):.1%}"
    print(f"permute and unpermute, forward and backward, at {at_least:.0%} of a plain copy's bandwidth or more: {said}")
    return not below


class CodecWorkload:
    """An expert of `elements` elements, its distance from the shared expert half of that one's spread. With a learning
    rate, its distance is a step of Adam's, 0.3 of that rate: in 16 bits a unit of the last place or nothing for most
    elements, so that thousands of residuals tie.

    The floors: encode must at least read expert and shared expert, and write the entries; decode read the entries and
    their elements, and write these.
    """

    def __init__(
        self, device: torch.device, elements: int, kept: int, dtype: str, seed: int, learning_rate: float | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shared = torch.randn(elements, generator=generator) * 0.02
        distance = 0.01 if learning_rate is None else 0.3 * learning_rate
        expert = shared + torch.randn(elements, generator=generator) * distance
        self.after = "" if learning_rate is None else ", after a step"
        self.device = device
        self.dtype = dtype
        self.kept = kept
        self.shared = shared.to(device=device, dtype=DTYPES[dtype])
        self.expert = expert.to(device=device, dtype=DTYPES[dtype])

    def measure(self, repeats: int) -> list[Row]:
        """Returns the measured rows of encode and of decode."""
        from megatron_moe_opt import kernels
        from tests.kernel_reference import sr_entries

        values, indices = kernels.sr_encode(self.expert, self.shared, self.kept)
        entries = sr_entries(indices, self.shared.numel())
        held = self.shared.clone()

        def encode_in_torch() -> tuple[torch.Tensor, torch.Tensor]:
            residual = self.expert - self.shared
            kept = residual.abs().topk(self.kept, sorted=False).indices
            return residual[kept], kept

        message = values.nbytes + indices.nbytes
        ours = {
            f"encode{self.after}": (
                lambda: kernels.sr_encode(self.expert, self.shared, self.kept),
                2 * held.nbytes + message,
            ),
            f"decode{self.after}": (lambda: kernels.sr_decode(values, indices, held), 2 * values.nbytes + message),
        }
        stock = {
            f"encode{self.after}": encode_in_torch,
            f"decode{self.after}": lambda: held.index_add_(0, entries, values),
        }
        return rows_of(ours, stock, self.dtype, repeats, self.device)


class Workload:
    """The data of one configuration, and the operations on it with the bytes that they must move."""

    def __init__(
        self, device: torch.device, tokens: int, hidden: int, experts: int, topk: int, dtype: str, seed: int
    ) -> None:
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
        self.token_bytes = self.tokens.nbytes
        self.permuted_bytes = self.permuted.nbytes

    def _random(self, generator: torch.Generator, rows: int) -> torch.Tensor:
        data = torch.randn(rows, self.shape[1], generator=generator)
        return data.to(device=self.device, dtype=DTYPES[self.dtype])

    def operations(self, library: Any) -> dict[str, tuple[Callable[[], Any], int]]:
        """Returns name -> (what to time, bytes it must move) for a library with Megatron-Core's two functions."""
        once = self.token_bytes + self.permuted_bytes
        indices = library.permute(self.tokens, self.routing_map, num_out_tokens=self.num_rows)[2]

        def permute() -> Any:
            return library.permute(self.tokens, self.routing_map, self.probs, num_out_tokens=self.num_rows)

        def unpermute(permuted: torch.Tensor, with_probs: bool) -> torch.Tensor:
            weights = (self.probs, self.routing_map) if with_probs else (None, None)
            return library.unpermute(permuted, indices, self.shape, *weights)

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

    def own_operations(self) -> dict[str, tuple[Callable[[], Any], int]]:
        """Returns, as `operations`, what Megatron-Core has no like of: with a row map made once, as in a layer."""
        from megatron_moe_opt import kernels

        once = self.token_bytes + self.permuted_bytes
        row_map = kernels.build_row_map(self.routing_map, num_out_tokens=self.num_rows)
        tokens, probs, permuted = self.tokens.detach(), self.probs.detach(), self.permuted.detach()
        return {
            "permute packed, map given": (
                lambda: kernels.permute_packed(tokens, probs, row_map),
                once + self.num_rows * kernels.LANE_BYTES,
            ),
            "unpermute, map given": (lambda: kernels.sum_packed_rows(permuted, self.shape[1], row_map), once),
        }

    def measure(self, repeats: int) -> list[Row]:
        """Returns a measured row for each operation."""
        from megatron_moe_opt import kernels

        ours = self.operations(kernels) | self.own_operations()
        name, library = stock_permute(self.device)
        stock = {} if library is None else {op: run for op, (run, _) in self.operations(library).items()}
        if name == FUSED:
            stock["unpermute, map given"] = stock["unpermute"]  # which takes the map that its permute has made
        return rows_of(ours, stock, self.dtype, repeats, self.device)

    def measure_wire(self, repeats: int) -> list[Row]:
        """Returns the measured rows of functions on rows in wire formats; what they are compared with does the same to
        rows in the dtype.
        """
        from megatron_moe_opt import kernels
        from megatron_moe_opt.kernels import ChunkList, WireFormat
        from megatron_moe_opt.runtime.engine import steps

        row_map = kernels.build_row_map(self.routing_map)
        tokens, probs, hidden = self.tokens.detach(), self.probs.detach(), self.shape[1]
        cuts = [self.num_rows // 3, self.num_rows // 3, self.num_rows - 2 * (self.num_rows // 3)]
        chunks = ChunkList.from_counts(cuts, [2, 1, 0], self.device)
        out = torch.empty(self.num_rows, hidden, dtype=tokens.dtype, device=self.device)

        def of(wire: WireFormat) -> dict[str, tuple[Callable[[], Any], int]]:
            packed = kernels.permute_packed(tokens, probs, row_map, wire)
            payload = self.num_rows * wire.payload_bytes(hidden, tokens.dtype)
            return {
                "permute": (lambda: kernels.permute_packed(tokens, probs, row_map, wire), self.token_bytes + payload),
                "reorder": (
                    lambda: steps.run_now(steps.convert_rows(packed, wire, out, WireFormat.SAME, hidden, chunks)),
                    payload + out.nbytes,
                ),
                "sum": (
                    lambda: kernels.sum_packed_rows(packed, hidden, row_map, wire, dtype=tokens.dtype),
                    payload + self.token_bytes,
                ),
            }

        same = {name: run for name, (run, _) in of(WireFormat.SAME).items()}
        packed, column = kernels.permute_packed(tokens, probs, row_map), self.probs.new_empty(self.num_rows, 1)
        first, size = hidden * tokens.element_size(), column.element_size()
        beside = {
            "probabilities split off": (
                lambda: steps.run_now(steps.copy_columns(packed, first, column, 0, size, chunks)),
                2 * column.nbytes,
            ),
            "row map cut in 4": (lambda: row_map.cut(4), 2 * row_map.rows.nbytes + row_map.experts.nbytes),
        }
        rows = rows_of(beside, {}, self.dtype, repeats, self.device)
        for wire in (WireFormat.BF16, WireFormat.FP8, WireFormat.MXFP8):
            if wire.dtype_of(tokens.dtype) == tokens.dtype:
                continue
            ours = {f"{name} in {wire.value}": timed for name, timed in of(wire).items()}
            stock = {f"{name} in {wire.value}": run for name, run in same.items()}
            rows += rows_of(ours, stock, self.dtype, repeats, self.device)
        return rows

    def measure_hops(self, repeats: int) -> list[Row]:
        """Returns the measured rows of copies where tokens hop: to eight domains of consecutive experts, or one an
        expert, and to the rows of experts.
        """
        from megatron_moe_opt import kernels
        from megatron_moe_opt.runtime.hops.hop_way import present
        from megatron_moe_opt.runtime.hops.row_facts import RowFacts, experts_of_tokens
        from megatron_moe_opt.runtime.rows.row_layout import Payload

        tokens, probs, num_experts = self.tokens.detach(), self.probs.detach(), self.routing_map.size(1)
        topk, domains = self.num_rows // self.shape[0], min(8, num_experts)
        experts = experts_of_tokens(self.routing_map, topk)
        layout = RowFacts(Payload.of(tokens), topk, probs.dtype).outbound()
        rows = layout.pack(tokens, probs.gather(1, experts), experts.int())
        to_domains = kernels.build_row_map(present(experts * domains // num_experts, domains))
        to_experts = kernels.build_row_map(self.routing_map)
        copies = layout.empty_rows(to_domains.sources.numel(), rows)
        out = torch.empty(self.num_rows, self.shape[1], dtype=tokens.dtype, device=self.device)
        ours = {
            "copies to domains": (
                lambda: kernels.spread_rows(rows, to_domains, copies),
                rows.nbytes + copies.nbytes,
            ),
            "rows of experts": (
                lambda: layout.spread(rows, to_experts, out),
                self.token_bytes + out.nbytes,
            ),
        }
        stock = {
            "copies to domains": lambda: torch.index_select(rows, 0, to_domains.sources, out=copies),
            "rows of experts": lambda: torch.index_select(rows[:, : out.size(1)], 0, to_experts.sources, out=out),
        }
        return rows_of(ours, stock, self.dtype, repeats, self.device)


def keep_freed_memory() -> None:
    """Makes glibc's malloc serve everything from its heap and never shrink that; without glibc, does nothing."""
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)  # -1: never


def stock_permute(device: torch.device) -> tuple[str, Any]:
    """Returns the name of what permutes in stock Megatron-Core on a device, and its two functions; None where
    Megatron-Core is not installed.
    """
    try:
        from megatron.core.transformer.moe import moe_utils
    except ImportError:
        return "Megatron-Core", None
    from megatron_moe_opt.integration.measuring.under_test import fused

    if device.type != "cuda" or not fused(torch.float32)["moe_permute_fusion"]:
        return "Megatron-Core", moe_utils
    permute, unpermute = (functools.partial(one, fused=True) for one in (moe_utils.permute, moe_utils.unpermute))
    return FUSED, SimpleNamespace(permute=permute, unpermute=unpermute)


def device_name(device: Device) -> str:
    """Returns the GPU's name, or which CPU kernels are in use."""
    if device is Device.cuda:
        return torch.cuda.get_device_name()
    from megatron_moe_opt.extension import build_info

    return f"cpu ({build_info()['cpu_kernels']})"


if __name__ == "__main__":
    main(app, "tools.bench.kernels")
