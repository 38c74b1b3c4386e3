"""Rows narrower on the wire than in compute: conversions between rows of a dtype and rows in a wire format.

Rows on the wire are tensors of `WireFormat.dtype_of` the rows' dtype, contiguous; what lies behind the payload of a row
is left alone. What the formats hold, and how they are rounded, is in csrc/kernels/wire_format.h. None of these
functions is differentiable.
"""

from __future__ import annotations

import torch

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels.host_pool import empty
from megatron_moe_opt.kernels.packed_rows import spread_rows
from megatron_moe_opt.kernels.row_map import RowMap
from megatron_moe_opt.row_format import WireFormat

_C = load_extension()


def narrow_rows(rows: torch.Tensor, wire: WireFormat, out: torch.Tensor) -> None:
    """Writes rows of a dtype in a wire format.

    Args:
        rows: [R, H], contiguous; float32, bfloat16 or float16.
        wire: the format of `out`.
        out: [R, W] of `wire.dtype_of(rows.dtype)`, contiguous, W at least the payload.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, non-contiguous tensors.
    """
    if wire.dtype_of(rows.dtype) == rows.dtype:
        out[:, : rows.size(1)].copy_(rows)
    else:
        _C.convert_rows(rows, WireFormat.SAME.value, rows.size(1), None, wire.value, out)


def widen_rows(wire_rows: torch.Tensor, wire: WireFormat, out: torch.Tensor) -> None:
    """Writes rows in a wire format as rows of a dtype, rounded once: the inverse of `narrow_rows`.

    Args:
        wire_rows: [R, W].
        wire: their format.
        out: [R, H], contiguous; float32, bfloat16 or float16.
    """
    if wire.dtype_of(out.dtype) == out.dtype:
        out.copy_(wire_rows[:, : out.size(1)])
    else:
        _C.convert_rows(wire_rows, wire.value, out.size(1), None, WireFormat.SAME.value, out)


def gather_rows(
    wire_rows: torch.Tensor, wire: WireFormat, row_map: RowMap, out: torch.Tensor, places: torch.Tensor | None = None
) -> None:
    """Does what `widen_rows` does, but of rows [T, W] each to all of its places in a map: out [R, H].

    Args:
        places: those of the map's rows, int64 [R], where they lie among others (RowMap.among).

    Raises:
        ValueError: a map that is cut.
    """
    if row_map.sources is None:
        raise ValueError("gather_rows: a row map that is cut does not say which row is whose")
    if wire.dtype_of(out.dtype) == out.dtype:
        spread_rows(wire_rows, row_map, out)
        return
    converted = out if places is None else empty((row_map.num_rows, out.size(1)), out.dtype, out.device)
    _C.convert_rows(wire_rows, wire.value, out.size(1), row_map.sources, WireFormat.SAME.value, converted)
    if places is not None:
        out.index_copy_(0, places, converted)
