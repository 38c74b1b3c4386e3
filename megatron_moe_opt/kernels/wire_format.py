"""Rows narrower on the wire than in compute: conversions between rows of a dtype and rows in a wire format.

Rows on the wire are tensors of `WireFormat.dtype_of` the rows' dtype, contiguous; what lies behind the payload of a row
is left alone. None of these functions is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_moe_opt.kernels.chunk_copy import ChunkList
from megatron_moe_opt.row_format import WireFormat


def narrow_rows(rows: torch.Tensor, wire: WireFormat, out: torch.Tensor) -> None:
    """Writes rows of a dtype in a wire format.

    Args:
        rows: [R, H], contiguous; float32, bfloat16 or float16.
        wire: the format of `out`.
        out: [R, W] of `wire.dtype_of(rows.dtype)`, contiguous, W at least the payload.
    """
    payload = _narrow(rows, wire)
    out[:, : payload.size(1)] = payload


def widen_rows(wire_rows: torch.Tensor, wire: WireFormat, out: torch.Tensor) -> None:
    """Writes rows in a wire format as rows of a dtype, rounded once: the inverse of `narrow_rows`.

    Args:
        wire_rows: [R, W].
        wire: their format.
        out: [R, H], contiguous; float32, bfloat16 or float16.
    """
    out.copy_(float_rows(wire_rows, wire, out.size(1)))


def gather_rows(wire_rows: torch.Tensor, wire: WireFormat, sources: torch.Tensor, out: torch.Tensor) -> None:
    """As `widen_rows`, out[r] from wire_rows[sources[r]]; sources: int64 [R], inside the rows."""
    widen_rows(wire_rows.index_select(0, sources), wire, out)


def convert_chunks(
    source: torch.Tensor,
    source_wire: WireFormat,
    target: torch.Tensor,
    target_wire: WireFormat,
    hidden: int,
    chunks: ChunkList,
) -> None:
    """Moves the rows of `chunks` from source to target, and to the format of these: the reorder between "by source
    rank" and "by local expert" that widens, or narrows.

    Args:
        source: [R, W], contiguous.
        target: [N, V], contiguous, apart from the source's memory.
        source_wire, target_wire: their formats; one of them is SAME.
        hidden: elements of a row; they begin at byte 0 on both sides.
        chunks: on the device of the rows.
    """
    lists = (chunks.source_rows.tolist(), chunks.target_rows.tolist(), chunks.row_counts.tolist())
    for first, there, count in zip(*lists, strict=True):
        moved = float_rows(source[first : first + count], source_wire, hidden)
        if target_wire.block is None:
            target[there : there + count, :hidden] = moved
        else:
            narrow_rows(moved, target_wire, target[there : there + count])


def sum_parts(parts: Sequence[torch.Tensor], out: torch.Tensor, hidden: int, wire: WireFormat) -> None:
    """out = parts[0] + parts[1] + ..., payloads in the same format: in float32, rounded once. `out` may be a part."""
    total = float_rows(parts[0], wire, hidden)
    for part in parts[1:]:
        total = total + float_rows(part, wire, hidden)
    narrow_rows(total if wire.block or wire is WireFormat.BF16 else total.to(out.dtype), wire, out)


def _narrow(rows: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """The payload of rows [R, H]."""
    if wire.block is None:
        return rows.to(wire.dtype_of(rows.dtype))
    hidden, blocks = rows.size(1), -(-rows.size(1) // wire.block)
    values = torch.nn.functional.pad(rows.float(), (0, blocks * wire.block - hidden)).view(-1, blocks, wire.block)
    finite = values.isfinite()
    largest = torch.where(finite, values.abs(), 0).amax(2)
    if wire is WireFormat.FP8:
        scales = torch.maximum(largest / torch.full_like(largest, 448), torch.full_like(largest, 2.0**-126))
        inverse = 1 / scales
    else:
        exponents = (((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(0, 246)
        inverse = ((254 - exponents) << 23).view(torch.float32)
        scales = exponents.to(torch.uint8)
    scaled = (values * inverse.unsqueeze(2)).clamp(-448, 448)
    codes = torch.where(finite, scaled.to(torch.float8_e4m3fn).view(torch.uint8), 0x7F)
    payload = torch.zeros(rows.size(0), wire.payload_bytes(hidden, rows.dtype), dtype=torch.uint8, device=rows.device)
    payload[:, :hidden] = codes.view(rows.size(0), blocks * wire.block)[:, :hidden]
    first = wire.first_scale(hidden)
    size = blocks * wire.scale_bytes
    payload[:, first : first + size] = scales.flatten().view(torch.uint8).view(rows.size(0), size)
    return payload


def float_rows(rows: torch.Tensor, wire: WireFormat, hidden: int) -> torch.Tensor:
    """What rows in a wire format stand for: float32 [R, H]."""
    if wire.block is None:
        return rows[:, :hidden].float().contiguous()
    blocks, first = -(-hidden // wire.block), wire.first_scale(hidden)
    scales = rows[:, first : first + blocks * wire.scale_bytes].contiguous()
    if wire is WireFormat.FP8:
        scales = scales.view(torch.float32)
    else:  # 2^-127, of the byte 0, is below the normal numbers
        scales = torch.where(scales == 0, 0x400000, scales.int() << 23).view(torch.float32)
    codes = rows[:, :hidden].view(torch.float8_e4m3fn).float()
    return codes * scales.repeat_interleave(wire.block, 1)[:, :hidden]
