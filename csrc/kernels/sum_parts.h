// The sum that ends a reduce-scatter: rows of several ranks, added in rank order.
#pragma once

#include <cstdint>

#include "types.h"

namespace moe_opt {

// out[r] = parts[0][r] + parts[1][r] + ..., one after the other; in float32 where elements are narrower, rounded once.
// `out` may be one of the parts. Rows are `width` elements wide, and of any format: wire_format.h. num_parts >= 1.
namespace cpu {
// Works on the rows [begin, end); the caller splits them over threads.
void sum_parts(DType dtype, int64_t width, const ConstRows* parts, int num_parts, MutableRows out, int64_t begin,
               int64_t end);
}  // namespace cpu

namespace cuda {
constexpr int kMaxRuns = 64;
// `parts` is a host array of device pointers: any number of parts, in at most kMaxRuns runs of some that lie at equal
// distances in memory, one behind another. Rows of all parts and of `out` have one stride, and lie at even addresses.
void sum_parts(DType dtype, int64_t width, const ConstRows* parts, int num_parts, MutableRows out, int64_t num_rows,
               void* stream);
}  // namespace cuda
}  // namespace moe_opt
