"""Python faces of the compiled kernels. Importing this package loads the extension (see `extension.py`)."""

from __future__ import annotations

from .chunk_copy import ChunkList, copy_chunks
from .count_tokens import count_routing_map, count_topk
from .extension import build_info
from .host_pool import empty
from .packed_rows import LANE_BYTES, permute_packed, sum_copies, unpermute_rows
from .permute import permute, unpermute
from .placement import place_samples, solve_placement, transfer_costs
from .residual_codec import sr_decode, sr_encode, sr_index_words, sr_wire_bytes
from .row_map import RowMap, build_row_map

__all__ = [
    "LANE_BYTES",
    "ChunkList",
    "RowMap",
    "build_info",
    "build_row_map",
    "copy_chunks",
    "count_routing_map",
    "count_topk",
    "empty",
    "permute",
    "permute_packed",
    "place_samples",
    "solve_placement",
    "sr_decode",
    "sr_encode",
    "sr_index_words",
    "sr_wire_bytes",
    "sum_copies",
    "transfer_costs",
    "unpermute",
    "unpermute_rows",
]
