#include "count_tokens.h"

#include <algorithm>
#include <vector>

namespace moe_opt {
namespace cpu {
namespace {

// Neighbouring tokens of a sample often go to the same expert, and an addition to a counter waits for the one before.
// So they take turns among copies of the counters.
constexpr int64_t kCopies = 4;

// Counters of one sample, kCopies rows of a power of two, so that a mask keeps any index inside.
class Counters {
 public:
  explicit Counters(int64_t num_experts) : num_experts_(num_experts) {
    while (width_ < num_experts) width_ *= 2;
    counts_.resize(kCopies * width_);
  }

  // Counts [first, first + count) and clears nothing.
  void add(const int64_t* experts, int64_t count) {
    const uint64_t mask = width_ - 1;
    uint32_t* counts = counts_.data();
    uint64_t seen = 0;  // a bit outside the mask: some index was negative or too large
    int64_t k = 0;
    for (; k + kCopies <= count; k += kCopies) {
      for (int64_t copy = 0; copy < kCopies; ++copy) {
        const uint64_t expert = static_cast<uint64_t>(experts[k + copy]);
        seen |= expert;
        ++counts[copy * width_ + (expert & mask)];
      }
    }
    for (; k < count; ++k) {
      const uint64_t expert = static_cast<uint64_t>(experts[k]);
      seen |= expert;
      ++counts[expert & mask];
    }
    valid_ &= (seen & ~mask) == 0;
  }

  // Writes the counts and clears them. False if an expert was outside [0, E).
  bool take(int64_t* num) {
    for (int64_t e = 0; e < width_; ++e) {
      int64_t total = 0;
      for (int64_t copy = 0; copy < kCopies; ++copy) total += counts_[copy * width_ + e];
      if (e < num_experts_) {
        num[e] = total;
      } else {
        valid_ &= total == 0;
      }
    }
    std::fill(counts_.begin(), counts_.end(), 0);
    return valid_;
  }

 private:
  int64_t num_experts_, width_ = 1;
  std::vector<uint32_t> counts_;
  bool valid_ = true;
};

// sums[c] += sum over rows of bytes[r * stride + c], where a byte is 0 or 1. Bytes are added as bytes, many at a time,
// and widened before they can overflow.
void add_columns(const uint8_t* bytes, int64_t num_rows, int64_t stride, int64_t width, int64_t* sums) {
  constexpr int64_t kTile = 1024;  // columns whose sums stay in the first-level cache
  constexpr int64_t kMaxRows = 255;
  uint8_t partial[kTile];
  for (int64_t first = 0; first < width; first += kTile) {
    const int64_t columns = std::min(kTile, width - first);
    for (int64_t begin = 0; begin < num_rows; begin += kMaxRows) {
      const int64_t end = std::min(num_rows, begin + kMaxRows);
      std::fill_n(partial, columns, uint8_t{0});
      for (int64_t r = begin; r < end; ++r) {
        const uint8_t* row = bytes + r * stride + first;
        for (int64_t c = 0; c < columns; ++c) partial[c] += row[c];
      }
      for (int64_t c = 0; c < columns; ++c) sums[first + c] += partial[c];
    }
  }
}

}  // namespace

bool count_topk(const SampleLayout& layout, const int64_t* experts, int64_t topk, int64_t num_experts, int64_t* num,
                int64_t begin, int64_t end) {
  const int64_t length = layout.tokens_per_sample;
  bool valid = true;
  if (layout.batch_first || layout.num_samples == 1) {
    Counters counters(num_experts);
    for (int64_t i = begin; i < end; ++i) {
      counters.add(experts + i * length * topk, length * topk);
      valid &= counters.take(num + i * num_experts);
    }
    return valid;
  }
  std::vector<Counters> counters(end - begin, Counters(num_experts));
  for (int64_t l = 0; l < length; ++l) {
    const int64_t* tokens = experts + l * layout.num_samples * topk;
    for (int64_t i = begin; i < end; ++i) counters[i - begin].add(tokens + i * topk, topk);
  }
  for (int64_t i = begin; i < end; ++i) valid &= counters[i - begin].take(num + i * num_experts);
  return valid;
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
