#include "chunk_copy.h"

#include <algorithm>

#include "cpu_dispatch.h"
#include "wire_format.h"

namespace moe_opt {
namespace cpu {

void copy_chunks(const ChunkList& chunks, int64_t row_bytes, const void* source, int64_t source_stride_bytes,
                 void* target, int64_t target_stride_bytes, int64_t begin, int64_t end) {
  int64_t num_rows = 0;
  for (int64_t c = 0; c < chunks.num_chunks; ++c) num_rows += chunks.row_counts[c];
  kernels().copy_chunks(chunks, row_bytes, source, source_stride_bytes, target, target_stride_bytes, begin, end,
                        should_stream(num_rows * row_bytes));
}

void convert_chunks(const ChunkList& chunks, DType from, DType to, int64_t hidden, ConstRows source, MutableRows target,
                    int64_t num_rows, int64_t begin, int64_t end) {
  int64_t flat = 0;  // first flat row of chunk c
  for (int64_t c = 0; c < chunks.num_chunks && flat < end; flat += chunks.row_counts[c++]) {
    const int64_t first = std::max<int64_t>(0, begin - flat), last = std::min(end - flat, chunks.row_counts[c]);
    if (first >= last) continue;
    const ConstRows in{static_cast<const uint8_t*>(source.data) + chunks.source_rows[c] * source.stride_bytes,
                       source.stride_bytes};
    const MutableRows out{static_cast<uint8_t*>(target.data) + chunks.target_rows[c] * target.stride_bytes,
                          target.stride_bytes};
    convert_rows(from, to, hidden, in, nullptr, out, num_rows, first, last);
  }
}

}  // namespace cpu
}  // namespace moe_opt
