"""Python faces of the compiled kernels. Importing this package loads the extension."""

from __future__ import annotations

from megatron_moe_opt.kernels.chunk_copy import ChunkList, copy_chunks
from megatron_moe_opt.kernels.count_tokens import count_routing_map
from megatron_moe_opt.kernels.host_pool import empty
from megatron_moe_opt.kernels.packed_rows import (
    LANE_BYTES,
    NOTE_BYTE,
    permute_packed,
    spread_rows,
    sum_packed_rows,
    unpermute_probs,
    write_notes,
)
from megatron_moe_opt.kernels.permute import permute, unpermute
from megatron_moe_opt.kernels.placement import place_samples, solve_placement
from megatron_moe_opt.kernels.residual_codec import sr_decode, sr_encode, sr_index_words, sr_wire_bytes
from megatron_moe_opt.kernels.row_map import RowMap, build_row_map, build_row_map_by_sample, row_map_from_sources
from megatron_moe_opt.kernels.wire_format import gather_rows, narrow_rows, widen_rows
from megatron_moe_opt.row_format import WireFormat

__all__ = [
    "LANE_BYTES",
    "NOTE_BYTE",
    "ChunkList",
    "RowMap",
    "WireFormat",
    "build_row_map",
    "build_row_map_by_sample",
    "copy_chunks",
    "count_routing_map",
    "empty",
    "gather_rows",
    "narrow_rows",
    "permute",
    "permute_packed",
    "place_samples",
    "row_map_from_sources",
    "solve_placement",
    "spread_rows",
    "sr_decode",
    "sr_encode",
    "sr_index_words",
    "sr_wire_bytes",
    "sum_packed_rows",
    "unpermute",
    "unpermute_probs",
    "widen_rows",
    "write_notes",
]
