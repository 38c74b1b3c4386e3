#include "count_tokens.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace moe_opt {
namespace cpu {
namespace {

// Rows of counters. A row is a power of two wide, so that a mask keeps any index inside; whether one was outside [0, E)
// is looked up afterwards.
class Counters {
 public:
  Counters(int64_t rows, int64_t num_experts) : num_experts_(num_experts) {
    while (width_ < num_experts) width_ *= 2;
    counts_.resize(rows * width_);
  }

  // Counts all experts of one sample. Neighbouring tokens often go to the same expert, and an addition to a counter
  // waits for the one before, so that they take turns among the first four rows.
  void add_sample(const int64_t* experts, int64_t count) {
    const uint32_t mask = mask_of_row();
    uint32_t* rows[] = {row(0), row(1), row(2), row(3)};
    uint64_t seen = 0;
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
      const uint64_t a = experts[k], b = experts[k + 1], c = experts[k + 2], d = experts[k + 3];
      seen |= (a | b) | (c | d);
      ++rows[0][static_cast<uint32_t>(a) & mask];
      ++rows[1][static_cast<uint32_t>(b) & mask];
      ++rows[2][static_cast<uint32_t>(c) & mask];
      ++rows[3][static_cast<uint32_t>(d) & mask];
    }
    for (; k < count; ++k) {
      seen |= static_cast<uint64_t>(experts[k]);
      ++rows[0][static_cast<uint32_t>(experts[k]) & mask];
    }
    note(seen);
  }

  // Counts one token of each of the samples 0 .. rows - 1, `topk` experts each. `TopK` may be a constant.
  template <typename TopK>
  void add_turns(const int64_t* experts, int64_t num_turns, int64_t stride, int64_t rows, TopK topk) {
    const uint32_t mask = mask_of_row();
    uint64_t seen = 0;
    for (int64_t turn = 0; turn < num_turns; ++turn) {
      const int64_t* chosen = experts + turn * stride;
      uint32_t* counts = row(0);
      for (int64_t r = 0; r < rows; ++r, chosen += topk, counts += mask + 1) {
        for (int64_t k = 0; k < topk; ++k) {
          seen |= static_cast<uint64_t>(chosen[k]);
          ++counts[static_cast<uint32_t>(chosen[k]) & mask];
        }
      }
    }
    note(seen);
  }

  // Adds a row to num [E] and clears it.
  void take(int64_t r, int64_t* num) {
    uint32_t* counts = row(r);
    for (int64_t e = 0; e < num_experts_; ++e) num[e] += counts[e];
    for (int64_t e = num_experts_; e < width_; ++e) valid_ &= counts[e] == 0;
    std::fill_n(counts, width_, 0);
  }

  // Whether every expert counted and taken so far was inside [0, E).
  bool valid() const { return valid_; }

 private:
  uint32_t mask_of_row() const { return static_cast<uint32_t>(width_ - 1); }
  uint32_t* row(int64_t r) { return counts_.data() + r * width_; }
  // seen: the bits of all indices. One above the mask: some index was negative or too large.
  void note(uint64_t seen) { valid_ &= seen < static_cast<uint64_t>(width_); }

  int64_t num_experts_, width_ = 1;
  std::vector<uint32_t> counts_;
  bool valid_ = true;
};

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

bool count_topk(const SampleLayout& layout, const int64_t* experts, int64_t topk, int64_t num_experts, int64_t* num,
                int64_t begin, int64_t end) {
  const int64_t length = layout.tokens_per_sample;
  std::fill(num + begin * num_experts, num + end * num_experts, 0);
  if (layout.batch_first || layout.num_samples == 1) {
    Counters counters(4, num_experts);
    for (int64_t i = begin; i < end; ++i) {
      counters.add_sample(experts + i * length * topk, length * topk);
      for (int64_t r = 0; r < 4; ++r) counters.take(r, num + i * num_experts);
    }
    return counters.valid();
  }
  Counters counters(end - begin, num_experts);
  const auto add = [&](auto constant_topk) {
    counters.add_turns(experts + begin * topk, length, layout.num_samples * topk, end - begin, constant_topk);
  };
  switch (topk) {  // the usual ones unrolled
    case 1:
      add(std::integral_constant<int64_t, 1>{});
      break;
    case 2:
      add(std::integral_constant<int64_t, 2>{});
      break;
    case 4:
      add(std::integral_constant<int64_t, 4>{});
      break;
    case 8:
      add(std::integral_constant<int64_t, 8>{});
      break;
    default:
      add(topk);
  }
  for (int64_t i = begin; i < end; ++i) counters.take(i - begin, num + i * num_experts);
  return counters.valid();
}

void count_routing_map(const SampleLayout& layout, const uint8_t* routing_map, int64_t num_experts, int64_t* num,
                       int64_t begin, int64_t end) {
  const int64_t length = layout.tokens_per_sample;
  std::fill(num + begin * num_experts, num + end * num_experts, 0);
  if (!layout.batch_first) {
    // The experts of all samples side by side are the columns.
    add_columns(routing_map + begin * num_experts, length, layout.num_samples * num_experts,
                (end - begin) * num_experts, num + begin * num_experts);
    return;
  }
  // Several tokens of a sample make one row of at least kWide bytes: short rows would be all overhead.
  constexpr int64_t kWide = 256;
  const int64_t fold = std::max<int64_t>(1, kWide / std::max<int64_t>(1, num_experts));
  const int64_t width = fold * num_experts, folded_rows = length / fold;
  std::vector<int64_t> sums(width);
  for (int64_t i = begin; i < end; ++i) {
    const uint8_t* sample = routing_map + i * length * num_experts;
    std::fill(sums.begin(), sums.end(), 0);
    add_columns(sample, folded_rows, width, width, sums.data());
    const int64_t rest = length - folded_rows * fold;
    add_columns(sample + folded_rows * width, 1, width, rest * num_experts, sums.data());
    for (int64_t c = 0; c < width; ++c) num[i * num_experts + c % num_experts] += sums[c];
  }
}

}  // namespace cpu
}  // namespace moe_opt
