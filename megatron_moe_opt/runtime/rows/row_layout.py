"""What a row on the wire holds, and the moves between rows on the wire and the tensors of experts."""

from __future__ import annotations

import torch

from megatron_moe_opt.kernels import LANE_BYTES, NOTE_BYTE, empty
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.rows.exchange_plan import ChunkPlan


class Layout:
    """A row's hidden elements, and what is behind them."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype) -> None:
        self.hidden, self.width, self.dtype = hidden, width, dtype
        self.row_bytes = width * dtype.itemsize

    @property
    def at_source(self) -> Layout:
        """Of the same rows where they come from, and to where gradients of all of them return."""
        return self

    def empty_rows(self, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        """[num_rows, width], on the device of `like`."""
        return empty((num_rows, self.width), self.dtype, like.device)

    def blank_rows(self, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        """As `empty_rows`, with zero in the lanes, whose bytes are not all written: what looks for NaNs in gradients
        (anomaly mode) finds none where nothing is.
        """
        rows = self.empty_rows(num_rows, like)
        if self.width > self.hidden:
            rows[:, self.hidden :] = 0
        return rows


class RowLayout(Layout):
    """With prob_dtype, the bits of a probability are in a lane behind the hidden elements."""

    def __init__(self, width: int, dtype: torch.dtype, prob_dtype: torch.dtype | None) -> None:
        lane = 0 if prob_dtype is None else LANE_BYTES // dtype.itemsize
        super().__init__(width - lane, width, dtype)
        self.hidden_bytes = self.hidden * dtype.itemsize
        self.columns = [(0, self.hidden, dtype)]
        """(first byte, elements, dtype) of what is summed in a row."""
        if prob_dtype is not None:
            self.columns.append((self.hidden_bytes, 1, prob_dtype))

    def split(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        probs: torch.Tensor | None,
        notes: torch.Tensor | None,
        chunk: ChunkPlan,
    ) -> Steps:
        """Rows in arrival order -> tokens (and probabilities, and notes) in expert order."""
        step = steps.copy_columns(rows, 0, tokens, 0, self.hidden_bytes, chunk.by_expert)
        if probs is not None:
            step += steps.copy_columns(rows, self.hidden_bytes, probs, 0, probs.element_size(), chunk.by_expert)
        if notes is not None:
            first_byte = self.hidden_bytes + NOTE_BYTE
            step += steps.copy_columns(rows, first_byte, notes, 0, notes.element_size(), chunk.by_expert)
        return step

    def join(self, tokens: torch.Tensor, probs: torch.Tensor | None, rows: torch.Tensor, chunk: ChunkPlan) -> Steps:
        """The inverse of `split`; what the probability leaves of its lane stays as it is, see `blank_rows`."""
        by_source = chunk.by_expert.inverse()
        step = steps.copy_columns(tokens, 0, rows, 0, self.hidden_bytes, by_source)
        if probs is not None:
            step += steps.copy_columns(probs, 0, rows, self.hidden_bytes, probs.element_size(), by_source)
        return step
