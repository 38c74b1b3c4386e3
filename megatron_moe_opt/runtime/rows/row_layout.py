"""What a row on the wire holds, and the moves between rows on the wire and the tensors of experts and of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch

from megatron_moe_opt.kernels import LANE_BYTES, NOTE_BYTE, ChunkList, RowMap, empty, sum_packed_rows
from megatron_moe_opt.kernels.wire_format import gather_rows, narrow_rows, widen_rows
from megatron_moe_opt.row_format import SAME, Wire, WireFormat
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.rows.exchange_plan import ChunkPlan

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Payload:
    """The hidden elements of rows: what they are at their source and at the experts, and how they travel."""

    hidden: int
    dtype: torch.dtype
    wire: Wire = SAME

    @classmethod
    def of(cls, tokens: torch.Tensor, wire: Wire = SAME) -> Payload:
        """Returns the payload of tokens [T, H]; bf16 on the wire changes nothing of rows in bfloat16."""
        return cls(tokens.size(1), tokens.dtype, wire.of_rows(tokens.dtype is torch.bfloat16))


class Layout:
    """A row on the wire: a payload in one of the wire's formats, and a lane behind it."""

    def __init__(
        self,
        payload: Payload,
        wire: WireFormat,
        lane_bytes: int = 0,
        summed: tuple[int, torch.dtype] | None = None,
    ) -> None:
        """
        Args:
            summed: (elements, dtype) of what is summed at the beginning of the lane; None: nothing is.
        """
        self.payload, self.hidden, self.dtype, self.wire = payload, payload.hidden, payload.dtype, wire
        self.lane = wire.payload_bytes(payload.hidden, payload.dtype)
        """The first byte of the lane."""
        self.row_bytes = self.lane + lane_bytes
        self.wire_dtype = wire.dtype_of(payload.dtype)
        self.width = self.row_bytes // self.wire_dtype.itemsize
        self.columns: list[tuple[int, int, torch.dtype | WireFormat]] = [
            (0, self.hidden, self.wire_dtype if wire.block is None else wire)
        ]
        """What is summed in a row, as steps.sum_parts takes it: in float32, and rounded once."""
        if summed is not None:
            self.columns.append((self.lane, *summed))

    @property
    def at_source(self) -> Layout:
        """Returns the layout of the same rows where they return to."""
        return self

    @cached_property
    def at_experts(self) -> Layout:
        """Returns the layout of the same rows as the experts have them."""
        return Layout(self.payload, WireFormat.SAME)

    def empty_rows(self, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        """Returns empty rows [num_rows, width] on the device of `like`."""
        return empty((num_rows, self.width), self.wire_dtype, like.device)

    def blank_rows(self, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        """Returns what `empty_rows` returns, but with zeros in the lanes, whose bytes are not all written: what looks
        for NaNs in what is sent, or for bytes that nobody has written, finds none.
        """
        rows = self.empty_rows(num_rows, like)
        if self.row_bytes > self.lane:
            self.of_lane(rows, 0, self.row_bytes - self.lane).zero_()
        return rows

    def narrow(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns [R, H] in the rows' dtype as [R, width], without what the lane holds; the
        same memory where it can be.
        """
        if self.wire is WireFormat.SAME and self.row_bytes == self.lane:
            return tokens
        rows = self.empty_rows(tokens.size(0), tokens)
        self.write(tokens, rows)
        return rows

    def write(self, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes tokens [R, H] to the payload of rows [R, width]."""
        if self.wire is WireFormat.SAME:
            rows[:, : self.hidden] = tokens
        else:
            narrow_rows(tokens, self.wire, rows)

    def tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the tokens [R, H] of rows [R, width] in the rows' dtype; the same memory where it can be."""
        if self.wire is WireFormat.SAME:
            return rows[:, : self.hidden]
        tokens = empty((rows.size(0), self.hidden), self.dtype, rows.device)
        widen_rows(rows, self.wire, tokens)
        return tokens

    def spread(
        self, rows: torch.Tensor, row_map: RowMap, tokens: torch.Tensor, places: torch.Tensor | None = None
    ) -> None:
        """Copies the token of each row to all of its places in the map, tokens [R, H], in the tokens' dtype.

        Args:
            places: of the map's rows, int64, where they lie among others.
        """
        gather_rows(rows, self.wire, row_map, tokens, places)

    def sum_rows(self, rows: torch.Tensor, row_map: RowMap, written: torch.Tensor, target: Layout) -> None:
        """Sums these rows by a map to the payload of `written`, of the layout `target`: in
        float32, and rounded once.
        """
        sum_packed_rows(rows, self.hidden, row_map, self.wire, written, target.wire)

    def sum_tokens(self, rows: torch.Tensor, row_map: RowMap) -> torch.Tensor:
        """Sums rows as `sum_rows` does, and returns the tokens [T, H] in the rows' dtype."""
        return sum_packed_rows(rows, self.hidden, row_map, self.wire, dtype=self.dtype)

    def of_lane(self, rows: torch.Tensor, first: int, num_bytes: int) -> torch.Tensor:
        """Returns these bytes of the lane of rows [R, width], uint8 [R, num_bytes]: the same memory."""
        lane = rows[:, self.lane // self.wire_dtype.itemsize :].view(torch.uint8)
        return lane[:, first : first + num_bytes]

    def numbers_of_lane(self, rows: torch.Tensor, first: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns those bytes as numbers of a type, [R, numbers]: a copy, as in a row they
        need not be aligned to it.
        """
        return self.of_lane(rows, first, num_bytes).clone(memory_format=torch.contiguous_format).view(dtype)


def rounding(tokens: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """Returns the squares of what a wire format loses of tokens [R, H], and of these: float64 [2], on their device."""
    layout = Layout(Payload(tokens.size(1), tokens.dtype), wire)
    lost = layout.tokens(layout.narrow(tokens)).double() - tokens.double()
    return torch.stack([lost.square().sum(), tokens.double().square().sum()])


@dataclass(frozen=True)
class AtExperts(Generic[Plan]):
    """Rows of one chunk where their experts are: on the wire, and as the experts have them."""

    rows: torch.Tensor
    """The rows as they arrived, or are to leave."""
    tokens: torch.Tensor
    """Inputs or outputs of experts, or their gradients, [N, H]."""
    probs: torch.Tensor | None
    """Probabilities or their gradients, [N]; None: the rows carry none."""
    notes: torch.Tensor | None
    """The notes, int32 [N], to be filled from the lanes; None: nobody wants them."""
    plan: Plan
    chunk: int
    layout: Layout
    """The layout of `rows`."""


class RowLayout(Layout):
    """The layout of a row for one expert of a token: with prob_dtype, the bits of a probability are in the lane."""

    def __init__(self, payload: Payload, wire: WireFormat, prob_dtype: torch.dtype | None) -> None:
        has_probs = prob_dtype is not None
        super().__init__(payload, wire, LANE_BYTES * has_probs, (1, prob_dtype) if has_probs else None)

    def split(self, here: AtExperts, chunk: ChunkPlan) -> Steps:
        """Moves rows in arrival order to tokens (and probabilities, and notes) in expert order."""
        step = self._move(here.rows, self.wire, here.tokens, WireFormat.SAME, chunk.by_expert)
        for first_byte, column in ((self.lane, here.probs), (self.lane + NOTE_BYTE, here.notes)):
            if column is not None:
                step += steps.copy_columns(here.rows, first_byte, column, 0, column.element_size(), chunk.by_expert)
        return step

    def join(self, here: AtExperts, chunk: ChunkPlan) -> Steps:
        """Does the inverse of `split`; what the probability leaves of its lane stays as it is, see `blank_rows`."""
        by_source, probs = chunk.by_expert.inverse(), here.probs
        step = self._move(here.tokens, WireFormat.SAME, here.rows, self.wire, by_source)
        if probs is not None:
            step += steps.copy_columns(probs, 0, here.rows, self.lane, probs.element_size(), by_source)
        return step

    def _move(
        self, source: torch.Tensor, there: WireFormat, target: torch.Tensor, here: WireFormat, chunks: ChunkList
    ) -> Steps:
        """Moves hidden elements from rows in one format to rows in another."""
        if self.wire is WireFormat.SAME:
            return steps.copy_columns(source, 0, target, 0, self.lane, chunks)
        return steps.convert_rows(source, there, target, here, self.hidden, chunks)
