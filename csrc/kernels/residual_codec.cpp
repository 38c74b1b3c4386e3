#include "residual_codec.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "cpu_dispatch.h"
#include "host_pool.h"

namespace moe_opt {
namespace cpu {
namespace {

constexpr int64_t kSampleLines = 2048;  // a cache line each: single elements would cost as many cache misses
constexpr int64_t kLineElements = 16;
constexpr Digit kDigits[] = {{20, 11}, {10, 10}, {0, 10}};

template <typename T>
struct PoolArray {
  explicit PoolArray(int64_t size) : data(static_cast<T*>(host_pool::allocate(size * sizeof(T)))) {}
  ~PoolArray() { host_pool::release(data); }
  PoolArray(const PoolArray&) = delete;
  PoolArray& operator=(const PoolArray&) = delete;
  T* const data;
};

const void* element(const void* data, int64_t index, DType dtype) {
  return static_cast<const uint8_t*>(data) + index * element_size(dtype);
}
void* element(void* data, int64_t index, DType dtype) {
  return static_cast<uint8_t*>(data) + index * element_size(dtype);
}

int64_t block_elements(int64_t numel, int64_t block) { return std::min(kCodecBlock, numel - block * kCodecBlock); }

int64_t block_end(const uint16_t* indices, int64_t block) {
  return indices[2 * block] | int64_t{indices[2 * block + 1]} << 16;
}
void set_block_end(uint16_t* indices, int64_t block, int64_t end) {
  indices[2 * block] = static_cast<uint16_t>(end);
  indices[2 * block + 1] = static_cast<uint16_t>(end >> 16);
}

// Residuals that one thread works on, and how many of them lie above and at the magnitude that find_kth found.
struct Part {
  const float* residuals;
  int64_t count;
  int64_t above = 0;
  int64_t equal = 0;
  std::vector<uint32_t> histogram = {};
};

// The rank-th largest magnitude of all parts together (1 <= rank <= their count): a radix select, exact.
uint32_t find_kth(std::vector<Part>& parts, int64_t rank, const ForEach& for_each) {
  uint32_t kth = 0;
  for (const Digit digit : kDigits) {
    for_each(parts.size(), [&](int64_t p) {
      parts[p].histogram.assign(size_t{1} << digit.bits, 0);
      kernels().residuals.count_digits(parts[p].residuals, parts[p].count, kth, digit, parts[p].histogram.data());
    });
    const auto in_bin = [&](uint32_t bin) {
      int64_t count = 0;
      for (const Part& part : parts) count += part.histogram[bin];
      return count;
    };
    uint32_t bin = (1u << digit.bits) - 1;
    for (int64_t count = in_bin(bin); count < rank; count = in_bin(bin)) {
      for (Part& part : parts) part.above += part.histogram[bin];
      rank -= count;
      --bin;
    }
    for (Part& part : parts) part.equal = part.histogram[bin];
    kth = kth << digit.bits | bin;
  }
  return kth;
}

class Encoder {
 public:
  Encoder(DType dtype, int64_t numel, const void* expert, const void* shared, int64_t num_ranges,
          const ForEach& for_each)
      : dtype_(dtype),
        numel_(numel),
        expert_(expert),
        shared_(shared),
        for_each_(for_each),
        blocks_(codec_blocks(numel)),
        range_blocks_((blocks_ + num_ranges - 1) / num_ranges),
        residuals_(numel),
        places_(numel),
        block_candidates_(blocks_),
        ranges_((blocks_ + range_blocks_ - 1) / range_blocks_) {}

  // Collects at least `kept` candidates: all residuals from a magnitude on that a sample suggests.
  void collect(int64_t kept) {
    const std::vector<float> sample = sample_residuals();
    const auto sampled = static_cast<int64_t>(sample.size());
    int64_t rank = sample_rank(numel_, kept, sampled);
    const ForEach in_order = [](int64_t count, const auto& body) {
      for (int64_t i = 0; i < count; ++i) body(i);
    };
    // Large residuals may lie closer together than the sample can tell: then there are too few.
    for (int64_t candidates = 0; candidates < kept; rank *= 2) {
      std::vector<Part> all = {{sample.data(), sampled}};
      candidates = collect_from(rank < sampled ? find_kth(all, rank, in_order) : 0);
    }
  }

  // Writes the `kept` largest of the candidates.
  void write(int64_t kept, void* values, uint16_t* indices) {
    const uint32_t kth = find_kth(ranges_, kept, for_each_);
    int64_t ties = kept;  // residuals of exactly the k-th magnitude to keep, the first ones
    for (const Part& range : ranges_) ties -= range.above;
    std::vector<Quota> quotas;
    std::vector<int64_t> first_entries = {0};
    for (const Part& range : ranges_) {
      const int64_t range_ties = std::min(ties, range.equal);
      ties -= range_ties;
      quotas.push_back({range.above + range_ties, range_ties});
      first_entries.push_back(first_entries.back() + quotas.back().entries);
    }
    uint16_t* const kept_places = indices + 2 * blocks_;
    for_each_(ranges_.size(), [&](int64_t r) {
      int64_t entry = first_entries[r];
      int64_t candidate = first_block(r) * kCodecBlock;
      for (int64_t b = first_block(r); b < first_block(r + 1); ++b) {
        entry += kernels().residuals.keep(
            dtype_, residuals_.data + candidate, places_.data + candidate, block_candidates_[b], kth, &quotas[r],
            element(expert_, b * kCodecBlock, dtype_), element(shared_, b * kCodecBlock, dtype_),
            element(values, entry, dtype_), kept_places + entry);
        candidate += block_candidates_[b];
        set_block_end(indices, b, entry);
      }
    });
  }

 private:
  int64_t first_block(int64_t range) const { return std::min(blocks_, range * range_blocks_); }

  int64_t select(int64_t first, int64_t count, uint32_t least, float* residuals, uint16_t* places) const {
    return kernels().residuals.select(dtype_, element(expert_, first, dtype_), element(shared_, first, dtype_), count,
                                      least, residuals, places);
  }

  // Residuals of evenly spread lines of elements, each at a random place of its share, so that no line meets the same
  // columns of a weight matrix again and again. Empty where the expert is too small for a sample to pay.
  std::vector<float> sample_residuals() const {
    if (numel_ < 2 * kSampleLines * kLineElements) return {};
    std::vector<float> sample(kSampleLines * kLineElements);
    uint16_t places[kLineElements];
    uint32_t random = 1;
    for (int64_t line = 0; line < kSampleLines; ++line) {
      random = random * 1664525u + 1013904223u;  // a linear congruential generator: its upper bits are good
      const int64_t first = numel_ * line / kSampleLines;
      const int64_t room = numel_ * (line + 1) / kSampleLines - first - kLineElements;
      select(first + (room * (random >> 16) >> 16), kLineElements, 0, sample.data() + line * kLineElements, places);
    }
    return sample;
  }

  // Makes all residuals of magnitude `least` and above candidates; returns their number.
  int64_t collect_from(uint32_t least) {
    for_each_(ranges_.size(), [&](int64_t r) {
      const int64_t first = first_block(r) * kCodecBlock;
      int64_t candidate = first;
      for (int64_t b = first_block(r); b < first_block(r + 1); ++b) {
        block_candidates_[b] = select(b * kCodecBlock, block_elements(numel_, b), least, residuals_.data + candidate,
                                      places_.data + candidate);
        candidate += block_candidates_[b];
      }
      ranges_[r] = {residuals_.data + first, candidate - first};
    });
    int64_t candidates = 0;
    for (const Part& range : ranges_) candidates += range.count;
    return candidates;
  }

  const DType dtype_;
  const int64_t numel_;
  const void* const expert_;
  const void* const shared_;
  const ForEach& for_each_;
  const int64_t blocks_;
  const int64_t range_blocks_;  // blocks that one thread works on
  // The candidates of a range lie side by side from the place of its first element on; the rest is never touched.
  const PoolArray<float> residuals_;
  const PoolArray<uint16_t> places_;
  std::vector<int64_t> block_candidates_;
  std::vector<Part> ranges_;
};

}  // namespace

void sr_encode(DType dtype, int64_t numel, const void* expert, const void* shared, int64_t kept, void* values,
               uint16_t* indices, int64_t num_ranges, const ForEach& for_each) {
  if (kept == 0) {
    std::fill_n(indices, codec_index_words(numel, 0), uint16_t{0});
    return;
  }
  Encoder encoder(dtype, numel, expert, shared, num_ranges, for_each);
  encoder.collect(kept);
  encoder.write(kept, values, indices);
}

bool codec_ends_valid(int64_t numel, const uint16_t* indices, int64_t kept) {
  int64_t last = 0;
  bool rising = true;
  for (int64_t b = 0; b < codec_blocks(numel); ++b) {
    rising &= block_end(indices, b) >= last;
    last = block_end(indices, b);
  }
  return rising && last == kept;
}

bool sr_decode(DType dtype, int64_t numel, const void* values, const uint16_t* indices, void* expert, int64_t begin,
               int64_t end) {
  const uint16_t* const places = indices + 2 * codec_blocks(numel);
  bool ok = true;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t first = b > 0 ? block_end(indices, b - 1) : 0;
    ok &=
        kernels().residuals.decode(dtype, element(values, first, dtype), places + first, block_end(indices, b) - first,
                                   element(expert, b * kCodecBlock, dtype), block_elements(numel, b));
  }
  return ok;
}

}  // namespace cpu
}  // namespace moe_opt
