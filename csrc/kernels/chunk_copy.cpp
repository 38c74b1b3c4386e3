#include "chunk_copy.h"

#include "cpu_dispatch.h"

namespace moe_opt {
namespace cpu {

void copy_chunks(const ChunkList& chunks, int64_t row_bytes, const void* source, int64_t source_stride_bytes,
                 void* target, int64_t target_stride_bytes, int64_t begin, int64_t end) {
  int64_t num_rows = 0;
  for (int64_t c = 0; c < chunks.num_chunks; ++c) num_rows += chunks.row_counts[c];
  kernels().copy_chunks(chunks, row_bytes, source, source_stride_bytes, target, target_stride_bytes, begin, end,
                        should_stream(num_rows * row_bytes));
}

}  // namespace cpu
}  // namespace moe_opt
