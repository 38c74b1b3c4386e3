"""The residual codec in `moe-opt bench kernels`: against the PyTorch operations that do the same, and against copies.

The floors: encode must at least read expert and shared expert, and write the entries; decode read the shared expert and
the entries, and write the expert. Both sides of decode write into memory that is there already.
"""

from __future__ import annotations

import torch

from megatron_moe_opt.cli.bench.kernel_timing import DTYPES, Row, rows_of


class CodecWorkload:
    """An expert of `elements` elements, its distance from the shared expert half of that one's spread."""

    def __init__(self, device: torch.device, elements: int, kept: int, dtype: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shared = torch.randn(elements, generator=generator) * 0.02
        expert = shared + torch.randn(elements, generator=generator) * 0.01
        self.device = device
        self.dtype = dtype
        self.kept = kept
        self.shared = shared.to(device=device, dtype=DTYPES[dtype])
        self.expert = expert.to(device=device, dtype=DTYPES[dtype])

    def measure(self, repeats: int) -> list[Row]:
        """Returns the measured rows of encode and of decode."""
        from megatron_moe_opt import kernels
        from megatron_moe_opt.kernels.reference import sr_entries

        values, indices = kernels.sr_encode(self.expert, self.shared, self.kept)
        entries = sr_entries(indices, self.shared.numel())
        out = torch.zeros_like(self.shared)

        def encode_in_torch() -> tuple[torch.Tensor, torch.Tensor]:
            residual = self.expert - self.shared
            kept = residual.abs().topk(self.kept, sorted=False).indices
            return residual[kept], kept

        moved_bytes = 2 * self.shared.nbytes + values.nbytes + indices.nbytes
        ours = {
            "encode": (lambda: kernels.sr_encode(self.expert, self.shared, self.kept), moved_bytes),
            "decode": (lambda: kernels.sr_decode(values, indices, self.shared, out), moved_bytes),
        }
        stock = {
            "encode": encode_in_torch,
            "decode": lambda: out.copy_(self.shared).index_add_(0, entries, values),
        }
        return rows_of(ours, stock, self.dtype, repeats, self.device)
