"""Moves chunks of consecutive rows: the reorder between "by source rank" and "by local expert"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels.streams import to_device

_C = load_extension()


@dataclass(frozen=True)
class ChunkList:
    """Chunks to move: c moves row_counts[c] rows from source_rows[c] on to target_rows[c] on; no row is moved twice."""

    source_rows: torch.Tensor  # int64 [chunks]
    target_rows: torch.Tensor  # int64 [chunks]
    row_counts: torch.Tensor  # int64 [chunks]
    num_rows: int

    @classmethod
    def from_counts(
        cls,
        row_counts: Sequence[int] | torch.Tensor,
        target_order: Sequence[int] | torch.Tensor,
        device: torch.device | str = "cpu",
    ) -> ChunkList:
        """Returns the chunks that lie one after another in the source and, in another order, in the target.

        Args:
            row_counts: rows of each chunk, in source order. A tensor must be on CPU.
            target_order: the chunks (numbers of their place in the source) in target order.
            device: where the rows are that will be copied.

        Raises:
            ValueError: target_order is not a permutation of the chunks, or a count is negative.
        """
        counts = torch.as_tensor(row_counts, dtype=torch.int64, device="cpu")
        order = torch.as_tensor(target_order, dtype=torch.int64, device="cpu")
        if not torch.equal(order.sort().values, torch.arange(counts.numel())):
            raise ValueError(f"target_order {order.tolist()} is not a permutation of {counts.numel()} chunks")
        if (counts < 0).any():
            raise ValueError(f"row_counts {counts.tolist()} has a negative count")
        source_rows = counts.cumsum(0) - counts
        ordered = counts[order]
        target_rows = torch.empty_like(counts)
        target_rows[order] = ordered.cumsum(0) - ordered
        lists = torch.stack([source_rows, target_rows, counts])
        return cls(*to_device(lists, device).unbind(), int(counts.sum()))

    def inverse(self) -> ChunkList:
        """Returns the list that moves every row back."""
        return ChunkList(self.target_rows, self.source_rows, self.row_counts, self.num_rows)

    def split(self, num_rows: Sequence[int]) -> list[ChunkList]:
        """Returns consecutive parts of equally many chunks, part i moving num_rows[i] rows."""
        lists = (tensor.chunk(len(num_rows)) for tensor in (self.source_rows, self.target_rows, self.row_counts))
        return [ChunkList(*part, rows) for *part, rows in zip(*lists, num_rows, strict=True)]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Returns the list in the form in which the extension takes it."""
        return self.source_rows, self.target_rows, self.row_counts, self.num_rows


def copy_chunks(rows: torch.Tensor, chunks: ChunkList) -> torch.Tensor:
    """Returns the rows in target order; not differentiable.

    Args:
        rows: [R, W] of any dtype, contiguous; R must be chunks.num_rows.
        chunks: on the device of `rows`.

    Raises:
        ValueError: non-contiguous rows, shapes or devices that do not fit, a chunk outside the rows.
    """
    return _C.copy_chunks(rows, chunks.tensors)
