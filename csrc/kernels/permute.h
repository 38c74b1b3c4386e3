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

#include "row_map.h"
#include "types.h"
#include "wire_format.h"

namespace moe_opt {

namespace cpu {

// Every CPU kernel below works on the tokens [begin, end): the caller splits [0, T) over threads.

// out[row] = tokens[t] for every row of t, in the format `wire`, which may be the dtype itself: permute forward, and
// unpermute backward without probabilities. A token is converted once. Where probs is not null ([T, E] of prob_size
// bytes each), permuted_probs gets the probability of each row: a lane of prob_lane_bytes >= prob_size (of any
// alignment) whose first prob_size bytes are the probability, the others zero.
void permute_rows(const RowMap& map, DType dtype, DType wire, int64_t hidden, ConstRows tokens, MutableRows permuted,
                  const void* probs, int64_t prob_size, MutableRows permuted_probs, int64_t prob_lane_bytes,
                  int64_t begin, int64_t end);

// tokens[t] = sum over t's rows of (prob *) permuted[row]; zero for a token without rows: unpermute forward, and
// permute backward. probs: float32 [T, E], or null.
void unpermute_rows(const RowMap& map, DType dtype, int64_t hidden, ConstRows permuted, const float* probs,
                    MutableRows tokens, int64_t begin, int64_t end);

// The same without probabilities, of rows in one format to tokens in another; sums(from, to), or a dtype to itself.
void sum_rows(const RowMap& map, DType from, DType to, int64_t hidden, ConstRows rows, MutableRows out, int64_t begin,
              int64_t end);

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

void permute_rows(const RowMap& map, DType dtype, DType wire, int64_t hidden, ConstRows tokens, MutableRows permuted,
                  const void* probs, int64_t prob_size, MutableRows permuted_probs, int64_t prob_lane_bytes,
                  void* stream);
// What permute_rows calls where wire is not the dtype.
void permute_wire(const RowMap& map, DType from, DType to, int64_t hidden, ConstRows tokens, MutableRows permuted,
                  const void* probs, int64_t prob_size, MutableRows permuted_probs, int64_t prob_lane_bytes,
                  void* stream);
void unpermute_rows(const RowMap& map, DType dtype, int64_t hidden, ConstRows permuted, const float* probs,
                    MutableRows tokens, void* stream);
void sum_rows(const RowMap& map, DType from, DType to, int64_t hidden, ConstRows rows, MutableRows out, void* stream);
void unpermute_rows_backward(const RowMap& map, DType dtype, int64_t hidden, ConstRows grad_tokens, ConstRows permuted,
                             const float* probs, MutableRows grad_permuted, float* grad_probs, void* stream);
void unpermute_probs(const RowMap& map, ConstRows grad_permuted_probs, int64_t prob_size, void* grad_probs,
                     void* stream);

}  // namespace cuda
}  // namespace moe_opt
