"""Rows that carry their probability with them, so that tokens and probabilities travel in one message.

A packed row is [hidden elements | a lane of LANE_BYTES]; the first bytes of the lane are the bits of the row's
probability (or of its gradient). From NOTE_BYTE of the lane on there is room for a note, an int32; the other bytes mean
nothing. On the wire the hidden elements may be narrower: the row then begins with the payload of a wire format, and has
its dtype.

Shapes: T tokens, E experts, H hidden size, R permuted rows, W = H + LANE_BYTES / element size.
"""

from __future__ import annotations

import torch

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels.host_pool import empty
from megatron_moe_opt.kernels.row_map import RowMap
from megatron_moe_opt.row_format import LANE_BYTES, NOTE_BYTE, WireFormat

_C = load_extension()


def permute_packed(
    tokens: torch.Tensor, probs: torch.Tensor, row_map: RowMap, wire: WireFormat = WireFormat.SAME
) -> torch.Tensor:
    """Permutes tokens and probabilities into packed rows. Not differentiable: their gradients come back in rows,
    which `sum_packed_rows` and `unpermute_probs` take apart.

    Args:
        tokens: [T, H], contiguous; float32, bfloat16 or float16.
        probs: [T, E]; float32, bfloat16, float16 or float64.
        row_map: of the same T and E.
        wire: of the rows. A token is read once, and converted once, however many rows it has.

    Returns:
        [R, W] in the dtype of `tokens`, or [R, payload + lane] in that of the wire.

    Raises:
        ValueError: non-contiguous tokens; shapes, dtypes or devices that do not fit; a gradient that would be lost.
    """
    if torch.is_grad_enabled() and (tokens.requires_grad or probs.requires_grad):
        raise ValueError("permute_packed: packed rows have no gradient of their own; call it under no_grad")
    return _C.permute_packed(row_map.tensors, tokens, probs.contiguous(), wire.value)


def write_notes(packed: torch.Tensor, notes: torch.Tensor) -> None:
    """Writes a note into the lane of each row; nothing that autograd sees.

    Args:
        packed: [R, W].
        notes: int32 [R].
    """
    row_bytes = packed.detach().view(torch.uint8)
    first = row_bytes.size(1) - LANE_BYTES + NOTE_BYTE
    row_bytes[:, first : first + 4] = notes.view(torch.uint8).view(-1, 4)


def unpermute_probs(packed: torch.Tensor, row_map: RowMap, dtype: torch.dtype) -> torch.Tensor:
    """Returns the bits in the lanes of packed rows [R, W] of any format, as probabilities [T, E] of `dtype`; zero where
    nothing was routed. Not differentiable.
    """
    return _C.unpermute_probs(row_map.tensors, packed, packed.size(1) - LANE_BYTES // packed.element_size(), dtype)


def sum_packed_rows(
    packed: torch.Tensor,
    hidden: int,
    row_map: RowMap,
    wire: WireFormat = WireFormat.SAME,
    out: torch.Tensor | None = None,
    out_wire: WireFormat = WireFormat.SAME,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Adds the rows of each token up, in float32 and the order of their experts; zero for a token without rows. Not
    differentiable.

    Args:
        packed: [R, W] or, where the map's rows lie among others, more; contiguous, in the format `wire`.
        hidden: elements of a row.
        wire: format of `packed`.
        out: where to write, [T, V], contiguous; what lies behind the sums is left alone. Default: a new tensor.
        out_wire: format of the sums, which are rounded to it once.
        dtype: of a new tensor of sums that are in no narrower format; default: that of `packed`.

    Returns:
        `out`, or the new tensor: [T, H], or [T, payload].
    """
    if out is None:
        dtype = dtype or packed.dtype
        kind = out_wire.dtype_of(dtype)
        width = out_wire.payload_bytes(hidden, dtype) // kind.itemsize
        out = empty((row_map.num_tokens, width), kind, packed.device)
    of_tokens = row_map.offsets, row_map.rows, None, row_map.num_experts  # whose expert a row is of makes no difference
    _C.sum_rows(of_tokens, packed, hidden, wire.value, out_wire.value, out)
    return out


def spread_rows(rows: torch.Tensor, row_map: RowMap, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copies each row to all of its places in the map. Not differentiable.

    Args:
        rows: [T, W], contiguous, of any dtype; a row's beginning is copied where `out` is narrower.
        out: where to write, [R, V] or, where the map's rows lie among others, more; contiguous, of an even number of
            bytes a row. Default: a new tensor [R, W].
    """
    if out is None:
        out = empty((row_map.num_rows, rows.size(1)), rows.dtype, rows.device)
    _C.spread_rows(row_map.tensors, rows, out)
    return out
