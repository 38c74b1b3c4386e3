"""What travels behind a token that several experts share: the probability of each, and which experts they are.

A row on the wire is [hidden elements | K probabilities | K expert numbers (int32)], K experts of a token at most, the
lane behind the hidden elements a multiple of LANE_BYTES. A token with fewer experts has the number E, "no expert", in
the other places. On the way back through the hops, the gradients of the K probabilities travel alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_moe_opt.kernels import LANE_BYTES, empty
from megatron_moe_opt.kernels.streams import has_streams
from megatron_moe_opt.runtime.rows.row_layout import Layout


@dataclass(frozen=True)
class RowFacts:
    """The layout of a row with its facts."""

    hidden: int
    dtype: torch.dtype
    topk: int
    prob_dtype: torch.dtype
    has_notes: bool = False
    """Whether on the way to the experts an int64 is behind those, whatever it says of the token."""

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the token itself."""
        return self.hidden * self.dtype.itemsize

    @property
    def prob_bytes(self) -> int:
        """Bytes that the K probabilities of a token take in its row."""
        return self.topk * self.prob_dtype.itemsize

    @property
    def width(self) -> int:
        """Elements of a row with probabilities and experts."""
        return self._width(self._first_note + 8 * self.has_notes)

    @property
    def _first_note(self) -> int:
        return self.prob_bytes + self.topk * torch.int32.itemsize

    @property
    def grad_width(self) -> int:
        """Elements of a row with probabilities alone."""
        return self._width(self.prob_bytes)

    def _width(self, num_bytes: int) -> int:
        lane = -(-num_bytes // LANE_BYTES) * LANE_BYTES
        return self.hidden + lane // self.dtype.itemsize

    def pack(
        self,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        experts: torch.Tensor | None = None,
        packed: torch.Tensor | None = None,
        notes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens [T, H], probs [T, K], experts int32 [T, K] -> `packed` [T, width]; without experts [T, grad_width].

        `notes` int64 [T] where there are any.
        """
        width = self.grad_width if experts is None else self.width
        if packed is None:
            packed = empty((tokens.size(0), width), self.dtype, tokens.device)
        packed[:, : self.hidden] = tokens
        lane = packed[:, self.hidden :].view(torch.uint8)
        lane[:, : self.prob_bytes] = probs.contiguous().view(torch.uint8)
        lane[:, self.prob_bytes :] = 0
        if experts is not None:
            lane[:, self.prob_bytes : self._first_note] = experts.contiguous().view(torch.uint8)
        if notes is not None:
            lane[:, self._first_note : self._first_note + 8] = notes.view(torch.uint8).view(-1, 8)
        return packed

    def tokens(self, packed: torch.Tensor) -> torch.Tensor:
        """[R, width or grad_width] -> [R, H], the same memory."""
        return packed[:, : self.hidden]

    def probs(self, packed: torch.Tensor) -> torch.Tensor:
        """[R, width or grad_width] -> [R, K]."""
        return self._part(packed, 0, self.prob_dtype)

    def experts(self, packed: torch.Tensor) -> torch.Tensor:
        """[R, width] -> int64 [R, K]."""
        return self._part(packed, self.prob_bytes, torch.int32).long()

    def notes(self, packed: torch.Tensor) -> torch.Tensor:
        """[R, width] -> int64 [R]."""
        lane = packed[:, self.hidden :].view(torch.uint8)
        return lane[:, self._first_note : self._first_note + 8].contiguous().view(torch.int64).view(-1)

    def _part(self, packed: torch.Tensor, first: int, dtype: torch.dtype) -> torch.Tensor:
        lane = packed[:, self.hidden :].view(torch.uint8)
        return lane[:, first : first + self.topk * dtype.itemsize].contiguous().view(dtype)


class FactLayout(Layout):
    """A row with its facts, with a part of them or with none."""

    def __init__(self, facts: RowFacts, width: int, dtype: torch.dtype) -> None:
        super().__init__(facts.hidden, width, dtype)
        self.facts, self.has_probs = facts, width > facts.hidden
        self.columns = [(0, facts.hidden, dtype)]
        """As RowLayout's."""
        if self.has_probs:
            self.columns.append((facts.hidden * dtype.itemsize, facts.topk, facts.prob_dtype))

    @property
    def at_source(self) -> Layout:
        """See Layout: gradients of probabilities return to where the numbers of experts were, too."""
        return FactLayout(self.facts, self.facts.width, self.dtype) if self.has_probs else self


def experts_of_tokens(routing_map: torch.Tensor, topk: int) -> torch.Tensor:
    """int64 [T, K]: the experts of each token, ascending, and E, "no expert", in the places that remain.

    Args:
        routing_map: bool [T, E].

    Raises:
        ValueError: a token has more than K experts (on CUDA an assertion on the device).
    """
    num_experts = routing_map.size(1)
    _require((routing_map.sum(1) <= topk).all(), f"a token has more than {topk} experts (--moe-router-topk)")
    falling = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=routing_map.device)
    return num_experts - (routing_map * falling).topk(topk).values.long()


def _require(holds: torch.Tensor, what: str) -> None:
    if has_streams(holds.device):
        torch._assert_async(holds, what)
    elif not holds:
        raise ValueError(what)
