#include "permute.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu_dispatch.h"

namespace moe_opt {
namespace cpu {
void permute_rows(const RowMap& map, DType dtype, DType wire, int64_t hidden, ConstRows tokens, MutableRows permuted,
                  const void* probs, int64_t prob_size, MutableRows permuted_probs, int64_t prob_lane_bytes,
                  int64_t begin, int64_t end) {
  const int64_t row_bytes = payload_bytes(wire, hidden);
  const bool streaming = should_stream(map.num_rows * row_bytes);
  if (probs == nullptr && wire == dtype) {
    return kernels().permute_rows(map, row_bytes, tokens, permuted, begin, end, streaming);
  }
  // A few tokens at a time: the ends of their rows, beside which packed probabilities lie, are still in the caches, and
  // so are tokens that were converted.
  constexpr int64_t kTokens = 16, kConvertedBytes = 32 * 1024;
  const bool is_narrowed = wire != dtype;
  const int64_t fit = kConvertedBytes / std::max<int64_t>(1, row_bytes);
  const int64_t together = is_narrowed ? std::clamp<int64_t>(fit, 1, kTokens) : kTokens;
  std::vector<uint8_t> converted(is_narrowed ? std::min(together, end - begin) * row_bytes : 0);
  for (int64_t first = begin; first < end; first += together) {
    const int64_t last = std::min(first + together, end);
    if (is_narrowed) {
      const MutableRows target{converted.data(), row_bytes};
      const ConstRows source{tokens.row(first), tokens.stride_bytes};
      kernels().wire.convert(dtype, wire, hidden, source, nullptr, target, 0, last - first, false);
      RowMap part = map;
      part.offsets += first;
      kernels().permute_rows(part, row_bytes, {target.data, row_bytes}, permuted, 0, last - first, streaming);
    } else {
      kernels().permute_rows(map, row_bytes, tokens, permuted, first, last, streaming);
    }
    if (probs == nullptr) continue;
    for (int64_t i = map.offsets[first], t = first; i < map.offsets[last]; ++i) {
      while (i == map.offsets[t + 1]) ++t;
      uint8_t* lane = permuted_probs.row(map.rows[i]);
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

void sum_rows(const RowMap& map, DType from, DType to, int64_t hidden, ConstRows rows, MutableRows out, int64_t begin,
              int64_t end) {
  if (from == to && !has_scales(from)) return unpermute_rows(map, from, hidden, rows, nullptr, out, begin, end);
  std::vector<const uint8_t*> of_token;
  for (int64_t t = begin; t < end; ++t) {
    of_token.clear();
    for (int64_t i = map.offsets[t]; i < map.offsets[t + 1]; ++i) of_token.push_back(rows.row(map.rows[i]));
    kernels().wire.sum(from, to, hidden, of_token.data(), static_cast<int64_t>(of_token.size()), true, out.row(t));
  }
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
      std::memcpy(out + (t * map.num_experts + map.experts[i]) * prob_size, grad_permuted_probs.row(map.rows[i]),
                  prob_size);
    }
  }
}

}  // namespace cpu
}  // namespace moe_opt
