"""This rank's own rows where they come from and return to: its tokens become rows on the wire, and come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_moe_opt.kernels import RowMap, permute_packed, spread_rows
from megatron_moe_opt.kernels.packed_rows import unpermute_probs
from megatron_moe_opt.row_format import SAME, Wire
from megatron_moe_opt.runtime.rows.row_layout import Payload, RowLayout
from megatron_moe_opt.runtime.rows.wire_rows import WireRows, off_wire, onto_wire


class Source(Protocol):
    """Makes rows on the wire from a rank's tokens, and takes what returns. Not differentiable."""

    def pack(self, tokens_TH: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Packs tokens and probabilities into rows on their way to the experts."""

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpacks the gradients of those rows, as they return, into those of tokens and probabilities."""

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Sums outputs, as they return, to those of tokens [T, H]."""

    def spread(self, grad_TH: torch.Tensor) -> torch.Tensor:
        """Makes rows on their way to the experts from the gradients of these sums."""


@dataclass(frozen=True)
class PermutedRows(Source):
    """A source with a row for each expert of a token."""

    row_map: RowMap
    payload: Payload
    prob_dtype: torch.dtype

    def pack(self, tokens_TH: torch.Tensor, probs_TE: torch.Tensor) -> torch.Tensor:
        """Returns tokens and probabilities as rows on their way to the experts."""
        return permute_packed(tokens_TH, probs_TE, self.row_map, self.payload.wire.dispatch)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradients of tokens and probabilities, made of those of their rows."""
        layout = self._homebound(self.prob_dtype)
        return layout.sum_tokens(rows, self.row_map), unpermute_probs(rows, self.row_map, self.prob_dtype)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Does what Source.sums says: a token's rows are added in the order of its experts, in float32."""
        return self._homebound(None).sum_tokens(rows, self.row_map)

    def spread(self, grad_TH: torch.Tensor) -> torch.Tensor:
        """Does what Source.spread says."""
        layout = RowLayout(self.payload, self.payload.wire.dispatch, None)
        return spread_rows(layout.narrow(grad_TH), self.row_map)

    def _homebound(self, prob_dtype: torch.dtype | None) -> RowLayout:
        return RowLayout(self.payload, self.payload.wire.combine, prob_dtype)


@dataclass(frozen=True)
class OwnRows:
    """The rows of one forward pass and, in its backward pass, their gradients."""

    source: Source
    wire: WireRows = field(default_factory=WireRows)

    def pack(self, tokens_TH: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Puts tokens on the wire and returns what stands for their rows. Differentiable once."""
        return onto_wire(self.wire, self.source.pack, self.source.unpack, tokens_TH, probs)

    def unpermute(self, returned: torch.Tensor) -> torch.Tensor:
        """Takes what has returned off the wire, given what stands for it: returns [T, H]. Differentiable once."""
        return off_wire(returned, self.wire, self.source.sums, self.source.spread)


def permuted(
    tokens_TH: torch.Tensor, probs_TE: torch.Tensor, row_map: RowMap, wire: Wire = SAME
) -> tuple[torch.Tensor, OwnRows]:
    """Puts a row for each expert of a token, as the map says, on the wire.

    Returns the tensor that stands for these rows in autograd, differentiable once, and the object that takes them off
    the wire when they have returned.
    """
    own = OwnRows(PermutedRows(row_map, Payload.of(tokens_TH, wire), probs_TE.dtype))
    return own.pack(tokens_TH, probs_TE), own
