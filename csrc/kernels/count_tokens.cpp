#include "count_tokens.h"

#include <algorithm>

namespace moe_opt {
namespace cpu {
namespace {

// sums[c] += the rows r of which bytes[r * stride + c] is not zero. They are counted in bytes, many at a time, and
// widened before those can overflow.
void add_columns(const uint8_t* bytes, int64_t num_rows, int64_t stride, int64_t width, int64_t* sums) {
  constexpr int64_t kTile = 4096;  // columns whose sums stay in the first-level cache
  constexpr int64_t kMaxRows = 255;
  uint8_t partial[kTile];
  for (int64_t first = 0; first < width; first += kTile) {
    const int64_t columns = std::min(kTile, width - first);
    for (int64_t begin = 0; begin < num_rows; begin += kMaxRows) {
      const int64_t end = std::min(num_rows, begin + kMaxRows);
      std::fill_n(partial, columns, uint8_t{0});
      for (int64_t r = begin; r < end; ++r) {
        const uint8_t* row = bytes + r * stride + first;
        for (int64_t c = 0; c < columns; ++c) partial[c] += row[c] != 0;
      }
      for (int64_t c = 0; c < columns; ++c) sums[first + c] += partial[c];
    }
  }
}

}  // namespace

void count_routing_map(const SampleLayout& layout, const uint8_t* routing_map, int64_t num_experts, int64_t* num,
                       int64_t begin, int64_t end) {
  std::fill(num + begin * num_experts, num + end * num_experts, 0);
  // The experts of all samples side by side are the columns.
  add_columns(routing_map + begin * num_experts, layout.tokens_per_sample, layout.num_samples * num_experts,
              (end - begin) * num_experts, num + begin * num_experts);
}

}  // namespace cpu
}  // namespace moe_opt
