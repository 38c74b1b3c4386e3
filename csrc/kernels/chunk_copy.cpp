#include "chunk_copy.h"

#include <algorithm>

#include "cpu_dispatch.h"
#include "wire_format.h"

namespace moe_opt {
namespace cpu {
namespace {

// Calls move(rows of the source, rows of the target, how many) for what each chunk has of the flat rows [begin, end).
template <typename Move>
void for_chunks(const ChunkList& chunks, ConstRows source, MutableRows target, int64_t begin, int64_t end,
                const Move& move) {
  int64_t flat = 0;  // first flat row of chunk c
  for (int64_t c = 0; c < chunks.num_chunks && flat < end; flat += chunks.row_counts[c++]) {
    const int64_t first = std::max<int64_t>(0, begin - flat), last = std::min(end - flat, chunks.row_counts[c]);
    if (first >= last) continue;
    move(ConstRows{source.row(chunks.source_rows[c] + first), source.stride_bytes},
         MutableRows{target.row(chunks.target_rows[c] + first), target.stride_bytes}, last - first);
  }
}

}  // namespace

void copy_chunks(const ChunkList& chunks, int64_t row_bytes, ConstRows source, MutableRows target, int64_t num_rows,
                 int64_t begin, int64_t end) {
  const bool streaming = should_stream(num_rows * row_bytes);
  const auto copy_rows = kernels().copy_rows;
  for_chunks(chunks, source, target, begin, end,
             [&](ConstRows from, MutableRows to, int64_t rows) { copy_rows(row_bytes, from, to, rows, streaming); });
}

void convert_chunks(const ChunkList& chunks, DType from, DType to, int64_t hidden, ConstRows source, MutableRows target,
                    int64_t num_rows, int64_t begin, int64_t end) {
  for_chunks(chunks, source, target, begin, end, [&](ConstRows in, MutableRows out, int64_t rows) {
    convert_rows(from, to, hidden, in, nullptr, out, num_rows, 0, rows);
  });
}

}  // namespace cpu
}  // namespace moe_opt
