// Token permutation of a Mixture-of-Experts layer: every (token, expert) pair of the routing map becomes one
// row, rows grouped by expert and, inside an expert, in token order (Megatron-Core's order).
//
// All kernels are token-major: a token's row is read once and written to each of its permuted rows, or its
// permuted rows are summed in registers and written once. Sums are taken in float32 in ascending row order.
//
// Shapes: T tokens, E experts, R permuted rows, H hidden size. All offsets are int64. Row strides are in bytes,
// so that a row can carry its probability behind it (see permute_rows). Rows of one matrix never overlap.
#pragma once

#include <cstdint>
#include <optional>

#include "types.h"

namespace moe_opt {

// The permuted rows that belong to each token, as compressed sparse rows over tokens.
struct RowMap {
  int64_t num_tokens;      // T
  int64_t num_experts;     // E
  int64_t num_rows;        // R
  const int64_t* offsets;  // [T + 1]; token t owns entries offsets[t] .. offsets[t + 1]
  const int64_t* rows;     // [R]; permuted row of each entry, ascending inside a token
  const int32_t* experts;  // [R]; expert of each entry; null where no kernel reads probabilities
};

namespace cpu {

// Every CPU kernel below works on the tokens [begin, end): the caller splits [0, T) over threads.

// Counts the rows each token owns (token_counts[t]) and each expert's tokens (expert_counts[e], of this range
// alone, so that the caller can turn ranges x experts into first rows by an exclusive scan in expert-major order).
// routing_map: [T, E] bytes, nonzero = routed.
void count_routed(const uint8_t* routing_map, int64_t num_experts, int64_t begin, int64_t end, int64_t* token_counts,
                  int64_t* expert_counts);

// Writes rows, experts (entries of tokens [begin, end)) and sources[row] = token. next_row: [E], the first permuted
// row of each expert for this range; advanced.
void fill_row_map(const uint8_t* routing_map, int64_t num_experts, int64_t begin, int64_t end, const int64_t* offsets,
                  int64_t* next_row, int64_t* rows, int32_t* experts, int64_t* sources);

// The whole map at once for drop-and-pad, over all tokens: every expert owns `capacity` rows (<= T), the tokens routed
// to it first, then, where they are fewer, the lowest tokens not routed to it (a stable descending sort of its column).
// offsets: [T + 1]; rows, experts and sources: [E * capacity].
void build_padded_row_map(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts, int64_t capacity,
                          int64_t* offsets, int64_t* rows, int32_t* experts, int64_t* sources);

// Builds offsets [T + 1] and rows [R] from sources [R], the token of each permuted row. Where experts is not null it
// gets row / rows_per_expert of each entry. Returns the first row whose source is outside [0, T), or -1 if none is;
// in the former case the outputs hold nothing useful.
int64_t build_row_map_from_sources(const int64_t* sources, int64_t num_rows, int64_t num_tokens,
                                   int64_t rows_per_expert, int64_t* offsets, int64_t* rows, int32_t* experts);

// out[row] = tokens[t] for every row of t: permute forward, and unpermute backward without probabilities.
// Where probs is not null ([T, E] of prob_size bytes each), permuted_probs gets the probability of each row: a lane of
// prob_lane_bytes >= prob_size (of any alignment) whose first prob_size bytes are the probability, the others zero.
void permute_rows(const RowMap& map, DType dtype, int64_t hidden, ConstRows tokens, MutableRows permuted,
                  const void* probs, int64_t prob_size, MutableRows permuted_probs, int64_t prob_lane_bytes,
                  int64_t begin, int64_t end);

// tokens[t] = sum over t's rows of (prob *) permuted[row]; zero for a token without rows: unpermute forward, and
// permute backward. probs: float32 [T, E], or null.
void unpermute_rows(const RowMap& map, DType dtype, int64_t hidden, ConstRows permuted, const float* probs,
                    MutableRows tokens, int64_t begin, int64_t end);

// Backward of unpermute_rows with probabilities: grad_permuted[row] = prob * grad_tokens[t] and
// grad_probs[t, e] = <grad_tokens[t], permuted[row]>; grad_probs is zero where nothing was routed.
void unpermute_rows_backward(const RowMap& map, DType dtype, int64_t hidden, ConstRows grad_tokens, ConstRows permuted,
                             const float* probs, MutableRows grad_permuted, float* grad_probs, int64_t begin,
                             int64_t end);

// Backward of the probabilities in permute_rows: grad_probs[t, e] = grad_permuted_probs[row], zero elsewhere.
void unpermute_probs(const RowMap& map, ConstRows grad_permuted_probs, int64_t prob_size, void* grad_probs,
                     int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

// As in cpu, over all tokens at once, on `stream` (a cudaStream_t). All pointers are device pointers.

// Bytes of scratch memory that build_row_map needs.
int64_t row_map_scratch_bytes(int64_t num_tokens, int64_t num_experts);

// Builds offsets [T + 1], rows, experts and sources [up to max_rows] and expert_counts [E] from routing_map.
// Rows at or past max_rows are not written and are no entries: offsets[T] <= max_rows, expert_counts count kept rows.
// With a capacity, drop-and-pad as in cpu::build_padded_row_map; max_rows is then not read, expert_counts not written.
void build_row_map(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts, int64_t max_rows,
                   std::optional<int64_t> capacity, int64_t* offsets, int64_t* rows, int32_t* experts, int64_t* sources,
                   int64_t* expert_counts, void* scratch, void* stream);

// Bytes of scratch memory that build_row_map_from_sources needs.
int64_t sources_scratch_bytes(int64_t num_rows, int64_t num_tokens);

// As in cpu; sources outside [0, T) are the caller's to refuse. Deterministic.
void build_row_map_from_sources(const int64_t* sources, int64_t num_rows, int64_t num_tokens, int64_t rows_per_expert,
                                int64_t* offsets, int64_t* rows, int32_t* experts, void* scratch, void* stream);

void permute_rows(const RowMap& map, DType dtype, int64_t hidden, ConstRows tokens, MutableRows permuted,
                  const void* probs, int64_t prob_size, MutableRows permuted_probs, int64_t prob_lane_bytes,
                  void* stream);
void unpermute_rows(const RowMap& map, DType dtype, int64_t hidden, ConstRows permuted, const float* probs,
                    MutableRows tokens, void* stream);
void unpermute_rows_backward(const RowMap& map, DType dtype, int64_t hidden, ConstRows grad_tokens, ConstRows permuted,
                             const float* probs, MutableRows grad_permuted, float* grad_probs, void* stream);
void unpermute_probs(const RowMap& map, ConstRows grad_permuted_probs, int64_t prob_size, void* grad_probs,
                     void* stream);

}  // namespace cuda
}  // namespace moe_opt
