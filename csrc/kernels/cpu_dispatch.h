// The CPU kernels compiled for each instruction set, and the choice among them at run time.
#pragma once

#include <cstdint>

#include "cpu_residuals.h"
#include "cpu_wire.h"
#include "permute.h"
#include "sum_parts.h"

namespace moe_opt {

// One instruction set's kernels, over the tokens or rows [begin, end). `streaming` asks for stores past the caches,
// which pay where the output is larger than the last-level cache.
struct CpuKernels {
  const char* name;
  void (*permute_rows)(const RowMap& map, int64_t row_bytes, ConstRows tokens, MutableRows permuted, int64_t begin,
                       int64_t end, bool streaming);
  void (*unpermute_rows)(const RowMap& map, DType dtype, int64_t hidden, ConstRows permuted, const float* probs,
                         MutableRows tokens, int64_t begin, int64_t end, bool streaming);
  void (*unpermute_rows_backward)(const RowMap& map, DType dtype, int64_t hidden, ConstRows grad_tokens,
                                  ConstRows permuted, const float* probs, MutableRows grad_permuted, float* grad_probs,
                                  int64_t begin, int64_t end, bool streaming);
  void (*copy_rows)(int64_t row_bytes, ConstRows source, MutableRows target, int64_t num_rows, bool streaming);
  // Not for float64.
  void (*sum_parts)(DType dtype, int64_t width, const ConstRows* parts, int num_parts, MutableRows out, int64_t begin,
                    int64_t end);
  const ResidualKernels& residuals;
  const WireKernels& wire;
};

namespace generic {
extern const CpuKernels kernels;
}
#ifdef MOE_OPT_X86
namespace avx2 {
extern const CpuKernels kernels;
}
namespace avx512 {
extern const CpuKernels kernels;
}
#endif

namespace cpu {

// The kernels in use: the best that this processor runs, unless select_kernels chose others.
const CpuKernels& kernels();

// Chooses kernels by name ("generic", "avx2", "avx512", or "best"); false if this processor or build lacks them.
// For tests and measurements; affects the whole process.
bool select_kernels(const char* name);

// Whether an output of this size should bypass the caches: it is larger than the last-level cache, or than the
// threshold that set_stream_threshold put in its place (negative: back to the cache's size). The latter is for tests.
bool should_stream(int64_t output_bytes);
void set_stream_threshold(int64_t bytes);

}  // namespace cpu
}  // namespace moe_opt
