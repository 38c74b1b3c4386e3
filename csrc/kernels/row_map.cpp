#include "row_map.h"

#include <algorithm>
#include <cstring>

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

RowMapBuilder::RowMapBuilder(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts,
                             int64_t tokens_a_range, const ForEach& for_each)
    : routing_map_(routing_map),
      num_tokens_(num_tokens),
      num_experts_(num_experts),
      range_(tokens_a_range),
      num_ranges_((num_tokens + range_ - 1) / range_),
      for_each_(for_each),
      of_ranges_(num_ranges_ * num_experts, 0) {}

template <typename Body>
void RowMapBuilder::for_ranges(const Body& body) {
  for_each_(num_ranges_, [&](int64_t i) {
    body(i * range_, std::min(num_tokens_, (i + 1) * range_), of_ranges_.data() + i * num_experts_);
  });
}

int64_t RowMapBuilder::count(int64_t* offsets, int64_t* expert_counts) {
  for_ranges([&](int64_t begin, int64_t end, int64_t* counts) {
    for (int64_t t = begin; t < end; ++t) {
      int64_t count = 0;
      for_each_routed(routing_map_ + t * num_experts_, num_experts_, [&](int64_t e) {
        ++count;
        ++counts[e];
      });
      offsets[t + 1] = count;
    }
  });
  int64_t row = 0;  // a scan in expert-major order gives each range its first rows
  for (int64_t e = 0; e < num_experts_; ++e) {
    const int64_t first = row;
    for (int64_t i = 0; i < num_ranges_; ++i) {
      const int64_t count = of_ranges_[i * num_experts_ + e];
      of_ranges_[i * num_experts_ + e] = row;
      row += count;
    }
    expert_counts[e] = row - first;
  }
  offsets[0] = 0;
  for (int64_t t = 0; t < num_tokens_; ++t) offsets[t + 1] += offsets[t];
  offsets_ = offsets;
  return row;
}

void RowMapBuilder::fill(int64_t* rows, int32_t* experts, int64_t* sources) {
  for_ranges([&](int64_t begin, int64_t end, int64_t* next_row) {
    for (int64_t t = begin; t < end; ++t) {
      int64_t entry = offsets_[t];
      for_each_routed(routing_map_ + t * num_experts_, num_experts_, [&](int64_t e) {
        const int64_t row = next_row[e]++;
        rows[entry] = row;
        experts[entry] = static_cast<int32_t>(e);
        sources[row] = t;
        ++entry;
      });
    }
  });
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

void cut_rows(const int64_t* rows, const int32_t* experts, const int64_t* expert_counts, int64_t num_rows,
              int64_t num_experts, int64_t num_chunks, int64_t* cut) {
  std::vector<int64_t> first_rows(num_experts);          // of each expert
  std::vector<int64_t> parts(num_chunks * num_experts);  // [chunks, E]: the first row of each
  int64_t row = 0, chunk_row = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    first_rows[e] = row;
    row += expert_counts[e];
  }
  for (int64_t c = 0; c < num_chunks; ++c) {
    for (int64_t e = 0; e < num_experts; ++e) {
      const int64_t n = expert_counts[e];
      parts[c * num_experts + e] = chunk_row;
      chunk_row += n * (c + 1) / num_chunks - n * c / num_chunks;
    }
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t n = expert_counts[experts[i]], index = rows[i] - first_rows[experts[i]];
    if (index < 0 || index >= n) {
      cut[i] = rows[i];
      continue;
    }
    const int64_t c = ((index + 1) * num_chunks - 1) / n;
    cut[i] = parts[c * num_experts + experts[i]] + index - n * c / num_chunks;
  }
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

}  // namespace cpu
}  // namespace moe_opt
