"""Small edits of the kernels, each of which the random cases must find: (file, what stands there, what stands for it,
the cases that reach it)."""

from __future__ import annotations

MUTANTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    # cuda_common.cuh
    ("cuda_common.cuh", "  __syncthreads();  // an earlier call may still be read\n", "", ("row_map",)),
    ("cuda_common.cuh", "warp] = value;\n  __syncthreads();", "warp] = value;", ("row_map",)),
    ("cuda_common.cuh", "if (lane >= distance) value += below;", "value += below;", ("row_map",)),
    # row_map.cu
    ("row_map.cu", "if (part >= num_parts) return;", "", ("row_map",)),
    ("row_map.cu", "min(int64_t{kPartTokens}, num_tokens - first)", "int64_t{kPartTokens}", ("row_map",)),
    ("row_map.cu", "earlier[warp][lane] = other;\n  __syncthreads();", "earlier[warp][lane] = other;", ("row_map",)),
    ("row_map.cu", "masks[e] = mask >> first_bit;", "masks[e] = mask;", ("row_map",)),
    ("row_map.cu", "((uint64_t{1} << j) - 1)", "((uint64_t{2} << j) - 1)", ("row_map",)),
    ("row_map.cu", "return row < max_rows ? row : -1;", "return row;", ("row_map",)),
    ("row_map.cu", "expert_counts[e] = total;", "expert_counts[e] = min(total, room);", ("row_map",)),
    ("row_map.cu", "min(cut_row, num_rows - 1)", "cut_row", ("row_map",)),
    (
        "row_map.cu",
        "token_entries[j] = entries;\n  }\n  __syncthreads();",
        "token_entries[j] = entries;\n  }",
        ("row_map",),
    ),
    ("row_map.cu", "max(int64_t{0}, capacity - total)", "capacity - total", ("row_map",)),
    ("row_map.cu", "expert_totals[e] + (first_token + j - row)", "expert_totals[e] + (j - row)", ("row_map",)),
    ("row_map.cu", "row += sum.total;\n    }\n    __syncthreads();", "row += sum.total;\n    }", ("row_map",)),
    ("row_map.cu", "(index + 1) * num_chunks - 1", "index * num_chunks", ("row_map",)),
    ("row_map.cu", "entry += unordered[other] < row", "entry += unordered[other] <= row", ("sources",)),
    ("row_map.cu", "next_one += ones.total;", "", ("sources",)),
    ("row_map.cu", "if (atomicAdd(&taken[token], 1ull) == 0) long_tokens", "long_tokens", ("sources",)),
    ("row_map.cu", "atomicAdd(&counts[token], 1ull);", "counts[token] += 1ull;", ("sources",)),
    # permute.cu
    (
        "permute.cu",
        "min(int64_t{piece_units}, units - base)",
        "piece_units",
        ("permute",),
    ),
    ("permute.cu", "    if (base > 0) __syncthreads();  // the piece before has been read\n", "", ("permute",)),
    (
        "permute.cu",
        "if (kBulk) bulk_publish();\n    __syncthreads();",
        "if (kBulk) bulk_publish();",
        ("permute",),
    ),
    (
        "permute.cu",
        "guessed && entry == entries.first + writer ? guessed_row : rows[entry]",
        "entry == entries.first + writer ? guessed_row : rows[entry]",
        ("permute", "packed"),
    ),
    ("permute.cu", "unit < lanes.prob_units ? probs[prob + unit] : ProbUnit{0}", "probs[prob + unit]", ("packed",)),
    (
        "permute.cu",
        "if (lane == 0) warp_dots[r][warp] = dot[r];\n    }\n    __syncthreads();",
        "if (lane == 0) warp_dots[r][warp] = dot[r];\n    }",
        ("permute",),
    ),
    ("permute.cu", "    __syncthreads();  // warp_dots is written again by the next entries\n", "", ("permute",)),
    ("permute.cu", "if (token >= num_tokens) return;", "", ("permute", "packed")),
    (
        "permute.cu",
        "guess.last);\n  const bool guessed = entries.first == guess.first && entries.last == guess.last;",
        "guess.last);\n  const bool guessed = true;",
        ("permute",),
    ),
    ("permute.cu", "if (held >= guess.last) held = -1;", "", ("packed",)),
    # chunk_copy.cu
    (
        "chunk_copy.cu",
        "if (threadIdx.x == 0) found_chunk = chunks.num_chunks;",
        "found_chunk = chunks.num_chunks;",
        ("chunks",),
    ),
    (
        "chunk_copy.cu",
        "chunk_end - count <= flat && flat < chunk_end",
        "chunk_end - count <= flat && flat <= chunk_end",
        ("chunks",),
    ),
    # sum_parts.cu
    ("sum_parts.cu", "if (step(p) == last.step_bytes) {", "if (last.count > 0) {", ("sums",)),
    ("sum_parts.cu", "left = runs[r].count - (r == 0 ? 1 : 0)", "left = runs[r].count - 1", ("sums",)),
    ("sum_parts.cu", "vector += 1 << lane_bits", "vector += 2 << lane_bits", ("sums",)),
    ("sum_parts.cu", "if (row >= num_rows) return;\n  for (int64_t vector", "for (int64_t vector", ("sums",)),
    # wire_format.cuh, wire_format.cu
    ("wire_format.cuh", "magnitude < 0x7f800000u ? magnitude : 0u", "magnitude", ("wire",)),
    ("wire_format.cuh", "(largest + 0x1fffffu) >> 23", "largest >> 23", ("wire",)),
    ("wire_format.cuh", "distance = kLanes / 2; distance > 0", "distance = kLanes / 2; distance > 1", ("wire",)),
    ("wire_format.cuh", "    if (piece % kLanes != 0) return;\n", "", ("wire",)),
    ("wire_format.cuh", "if (piece * kPiece >= side.hidden) return;", "", ("wire",)),
    ("wire_format.cu", "if (row[r] < 0) continue;", "", ("wire",)),
    ("sum_parts.cu", "    __syncthreads();  // where", "    // where", ("wire",)),
    # residual_codec.cu
    ("residual_codec.cu", "    above += sum_above.total;\n", "", ("second_round",)),
    (
        "residual_codec.cu",
        "equal += sum_equal.total;\n    __syncthreads();",
        "equal += sum_equal.total;",
        ("second_round",),
    ),
    ("residual_codec.cu", "seen_ties + lower_lanes(tied) < ties", "seen_ties + lower_lanes(tied) <= ties", ("codec",)),
    ("residual_codec.cu", "first_place + index + i", "first_place + index", ("codec",)),
    ("residual_codec.cu", "block * kCodecBlock + places[entry]", "places[entry]", ("codec",)),
)
