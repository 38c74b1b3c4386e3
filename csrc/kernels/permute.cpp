#include "permute.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu_dispatch.h"

namespace moe_opt {
namespace cpu {
namespace {

// Calls visit(e) for every nonzero byte of a routing-map row, in ascending order. Maps are sparse: eight bytes are
// skipped at a time.
template <typename Visit>
void for_each_routed(const uint8_t* row, int64_t num_experts, Visit visit) {
  int64_t e = 0;
  for (; e + 8 <= num_experts; e += 8) {
    uint64_t word;
    std::memcpy(&word, row + e, sizeof(word));
    if (word == 0) continue;
    for (int64_t i = e; i < e + 8; ++i) {
      if (row[i] != 0) visit(i);
    }
  }
  for (; e < num_experts; ++e) {
    if (row[e] != 0) visit(e);
  }
}

}  // namespace

void count_routed(const uint8_t* routing_map, int64_t num_experts, int64_t begin, int64_t end, int64_t* token_counts,
                  int64_t* expert_counts) {
  for (int64_t t = begin; t < end; ++t) {
    int64_t count = 0;
    for_each_routed(routing_map + t * num_experts, num_experts, [&](int64_t e) {
      ++count;
      ++expert_counts[e];
    });
    token_counts[t] = count;
  }
}

void fill_row_map(const uint8_t* routing_map, int64_t num_experts, int64_t begin, int64_t end, const int64_t* offsets,
                  int64_t* next_row, int64_t* rows, int32_t* experts, int64_t* sources) {
  for (int64_t t = begin; t < end; ++t) {
    int64_t entry = offsets[t];
    for_each_routed(routing_map + t * num_experts, num_experts, [&](int64_t e) {
      const int64_t row = next_row[e]++;
      rows[entry] = row;
      experts[entry] = static_cast<int32_t>(e);
      sources[row] = t;
      ++entry;
    });
  }
}

void build_padded_row_map(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts, int64_t capacity,
                          int64_t* offsets, int64_t* rows, int32_t* experts, int64_t* sources) {
  std::vector<int64_t> next_routed(num_experts, 0);  // counts first
  for (int64_t t = 0; t < num_tokens; ++t) {
    for_each_routed(routing_map + t * num_experts, num_experts, [&](int64_t e) { ++next_routed[e]; });
  }
  // An expert's rows: [routed tokens | padding]. The two cursors walk to the end of the routed and of all rows.
  std::vector<int64_t> end_routed(num_experts), next_padding(num_experts);
  int64_t padding_left = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    end_routed[e] = next_padding[e] = e * capacity + std::min(next_routed[e], capacity);
    next_routed[e] = e * capacity;
    padding_left += (e + 1) * capacity - next_padding[e];
  }
  int64_t entry = 0;
  for (int64_t t = 0; t < num_tokens; ++t) {
    offsets[t] = entry;
    const uint8_t* row_of_map = routing_map + t * num_experts;
    const auto place = [&](int64_t e, int64_t row) {
      rows[entry] = row;
      experts[entry] = static_cast<int32_t>(e);
      sources[row] = t;
      ++entry;
    };
    const auto place_routed = [&](int64_t e) {
      if (next_routed[e] < end_routed[e]) place(e, next_routed[e]++);
    };
    if (padding_left == 0) {
      for_each_routed(row_of_map, num_experts, place_routed);
      continue;
    }
    for (int64_t e = 0; e < num_experts; ++e) {
      if (row_of_map[e] != 0) {
        place_routed(e);
      } else if (next_padding[e] < (e + 1) * capacity) {
        place(e, next_padding[e]++);
        --padding_left;
      }
    }
  }
  offsets[num_tokens] = entry;
}

int64_t build_row_map_from_sources(const int64_t* sources, int64_t num_rows, int64_t num_tokens,
                                   int64_t rows_per_expert, int64_t* offsets, int64_t* rows, int32_t* experts) {
  std::fill(offsets, offsets + num_tokens + 1, 0);
  for (int64_t r = 0; r < num_rows; ++r) {
    if (sources[r] < 0 || sources[r] >= num_tokens) return r;
    ++offsets[sources[r] + 1];
  }
  for (int64_t t = 0; t < num_tokens; ++t) offsets[t + 1] += offsets[t];
  std::vector<int64_t> next(offsets, offsets + num_tokens);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t entry = next[sources[r]]++;
    rows[entry] = r;
    if (experts != nullptr) experts[entry] = static_cast<int32_t>(r / rows_per_expert);
  }
  return -1;
}

void permute_rows(const RowMap& map, DType dtype, int64_t hidden, ConstRows tokens, MutableRows permuted,
                  const void* probs, int64_t prob_size, MutableRows permuted_probs, int64_t prob_lane_bytes,
                  int64_t begin, int64_t end) {
  const int64_t row_bytes = hidden * element_size(dtype);
  const bool streaming = should_stream(map.num_rows * row_bytes);
  if (probs == nullptr) return kernels().permute_rows(map, row_bytes, tokens, permuted, begin, end, streaming);
  // A few tokens at a time: the ends of their rows, beside which packed probabilities lie, are still in the caches.
  constexpr int64_t kTokens = 16;
  for (int64_t first = begin; first < end; first += kTokens) {
    const int64_t last = std::min(first + kTokens, end);
    kernels().permute_rows(map, row_bytes, tokens, permuted, first, last, streaming);
    for (int64_t i = map.offsets[first], t = first; i < map.offsets[last]; ++i) {
      while (i == map.offsets[t + 1]) ++t;
      uint8_t* lane = static_cast<uint8_t*>(permuted_probs.data) + map.rows[i] * permuted_probs.stride_bytes;
      const int64_t pair = t * map.num_experts + map.experts[i];
      std::memcpy(lane, static_cast<const uint8_t*>(probs) + pair * prob_size, prob_size);
      std::memset(lane + prob_size, 0, prob_lane_bytes - prob_size);
    }
  }
}

void unpermute_rows(const RowMap& map, DType dtype, int64_t hidden, ConstRows permuted, const float* probs,
                    MutableRows tokens, int64_t begin, int64_t end) {
  const bool streaming = should_stream(map.num_tokens * hidden * element_size(dtype));
  kernels().unpermute_rows(map, dtype, hidden, permuted, probs, tokens, begin, end, streaming);
}

void unpermute_rows_backward(const RowMap& map, DType dtype, int64_t hidden, ConstRows grad_tokens, ConstRows permuted,
                             const float* probs, MutableRows grad_permuted, float* grad_probs, int64_t begin,
                             int64_t end) {
  const bool streaming = should_stream(map.num_rows * hidden * element_size(dtype));
  kernels().unpermute_rows_backward(map, dtype, hidden, grad_tokens, permuted, probs, grad_permuted, grad_probs, begin,
                                    end, streaming);
}

void unpermute_probs(const RowMap& map, ConstRows grad_permuted_probs, int64_t prob_size, void* grad_probs,
                     int64_t begin, int64_t end) {
  uint8_t* out = static_cast<uint8_t*>(grad_probs);
  std::fill_n(out + begin * map.num_experts * prob_size, (end - begin) * map.num_experts * prob_size, uint8_t{0});
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t i = map.offsets[t]; i < map.offsets[t + 1]; ++i) {
      const uint8_t* lane =
          static_cast<const uint8_t*>(grad_permuted_probs.data) + map.rows[i] * grad_permuted_probs.stride_bytes;
      std::memcpy(out + (t * map.num_experts + map.experts[i]) * prob_size, lane, prob_size);
    }
  }
}

}  // namespace cpu
}  // namespace moe_opt
