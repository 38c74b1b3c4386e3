"""What the kernels cost, counted on the emulator: see counting.h.

python -m tests.emulator.counts --write     renews csrc/kernels/launches.txt, the launches of every bound function
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from typing import NamedTuple

from tests.emulator import plugin  # before torch
from tests.emulator.build import ROOT

import torch  # isort: skip

from megatron_moe_opt import kernels  # isort: skip
from megatron_moe_opt.extension import load_extension  # isort: skip

TABLE = ROOT / "csrc" / "kernels" / "launches.txt"
DEVICE = torch.device("cuda")


class Launch(NamedTuple):
    """A kernel's launch, and the 32-byte sectors of global memory that it touches, as counting.h says."""

    kernel: str
    blocks: int
    threads: int
    asked_read: int
    asked_written: int
    read: int
    written: int


def counted(call: Callable[[], object]) -> tuple[list[Launch], int]:
    """The launches of a call, in their order, and the number of its memsets."""
    plugin.switches.emulator_begin_counting()
    call()
    plugin.switches.emulator_end_counting.restype = ctypes.c_char_p
    lines = [line.split() for line in plugin.switches.emulator_end_counting().decode().splitlines()]
    launches = [Launch(line[0], *map(int, line[1:])) for line in lines if line[0] != "memset"]
    return launches, len(lines) - len(launches)


def routing(num_tokens: int, num_experts: int, topk: int) -> torch.Tensor:
    """A routing map [T, E] on the device: every token goes to `topk` random experts."""
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(0))
    chosen = scores.topk(topk).indices
    return torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, chosen, True).to(DEVICE)


def ops() -> dict[str, Callable[[], object]]:
    """A call of every bound function that launches kernels, of a size at which it takes none of its short cuts."""
    extension = load_extension()
    num_tokens, num_experts, topk, hidden = 70, 12, 2, 64
    routed = routing(num_tokens, num_experts, topk)
    row_map = kernels.build_row_map(routed)
    tokens, probs = (torch.rand(num_tokens, width).to(DEVICE) for width in (hidden, num_experts))
    rows, row_probs = extension.permute_rows(row_map.tensors, tokens, probs)
    chunks = kernels.ChunkList.from_counts([40, 100], [1, 0], DEVICE)
    expert = torch.rand(17_000).to(DEVICE)
    shared, kept = torch.zeros_like(expert), 100
    values, indices = extension.sr_encode(expert, shared, kept)
    chunk_tensors = (chunks.source_rows, chunks.target_rows, chunks.row_counts, chunks.num_rows)
    out = torch.zeros_like(rows)
    coded = torch.zeros(rows.size(0), hidden + 16, dtype=torch.uint8).to(DEVICE)
    return {
        "build_row_map": lambda: extension.build_row_map(routed, num_tokens * topk),
        "build_padded_row_map": lambda: extension.build_padded_row_map(routed, 9),
        "build_row_map_from_sources": lambda: extension.build_row_map_from_sources(row_map.sources, num_tokens, 1),
        "cut_rows": lambda: extension.cut_rows(row_map.tensors, row_map.expert_counts, 4),
        "permute_rows": lambda: extension.permute_rows(row_map.tensors, tokens, probs),
        "spread_rows": lambda: extension.spread_rows(row_map.tensors, tokens, rows),
        "permute_packed": lambda: extension.permute_packed(row_map.tensors, tokens, probs, "same"),
        "permute_packed in fp8": lambda: extension.permute_packed(row_map.tensors, tokens, probs, "fp8"),
        "unpermute_rows": lambda: extension.unpermute_rows(row_map.tensors, rows, hidden, probs),
        "unpermute_rows_backward": lambda: extension.unpermute_rows_backward(row_map.tensors, tokens, rows, probs),
        "sum_rows": lambda: extension.sum_rows(row_map.tensors, coded, hidden, "fp8", "same", tokens),
        "unpermute_probs": lambda: extension.unpermute_probs(row_map.tensors, row_probs, 0, torch.float32),
        "copy_chunks": lambda: extension.copy_chunks(rows, chunk_tensors),
        "convert_rows": lambda: extension.convert_rows(rows, "same", hidden, None, "fp8", coded),
        "convert_chunks": extension.convert_chunks(rows, "same", coded, "fp8", hidden, chunk_tensors).run,
        "copy_rows": extension.copy_rows(rows, 0, out, 0, hidden * 4, chunk_tensors).run,
        "sum_parts": extension.sum_parts([rows, rows], out, 0, hidden, torch.float32).run,
        "sum_parts in fp8": extension.sum_parts([coded, coded], coded, 0, hidden, "fp8").run,
        "sum_parts of float64": extension.sum_parts([rows, rows], out, 0, hidden // 2, torch.float64).run,
        "sr_encode": lambda: extension.sr_encode(expert, shared, kept),
        "sr_decode": lambda: extension.sr_decode(values, indices, expert),
    }


def launch_table() -> str:
    """The text of csrc/kernels/launches.txt."""
    lines = [
        "# Launches and memsets of every bound function on CUDA, in the order of its kernels; written by",
        "# python -m tests.emulator.counts --write",
        f"{'function':<32}{'launches':>8}{'memsets':>9}  kernels",
    ]
    for name, call in ops().items():
        launches, memsets = counted(call)
        names = " ".join(launch.kernel.removesuffix("_kernel") for launch in launches)
        lines.append(f"{name:<32}{len(launches):>8}{memsets:>9}  {names}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        TABLE.write_text(launch_table())
    else:
        print(launch_table(), end="")


if __name__ == "__main__":
    main()
