// Row maps: which permuted rows belong to which token. Rows are grouped by expert and, inside an expert, in token order
// (Megatron-Core's order).
//
// Shapes: T tokens, E experts, R permuted rows. routing_map: [T, E] bytes, nonzero = routed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "for_each.h"

namespace moe_opt {

// The permuted rows that belong to each token, as compressed sparse rows over tokens.
struct RowMap {
  int64_t num_tokens;      // T
  int64_t num_experts;     // E
  int64_t num_rows;        // R
  const int64_t* offsets;  // [T + 1]; token t owns entries offsets[t] .. offsets[t + 1]
  const int64_t* rows;     // [R]; permuted row of each entry, ascending inside a token
  const int32_t* experts;  // [R]; expert of each entry; null where no kernel reads probabilities
};

namespace cpu {

// The row map of a routing map, in two steps: how many rows there are, and so how large their arrays, is known after
// the first. Ranges of tokens_a_range > 0 tokens are worked on side by side.
class RowMapBuilder {
 public:
  RowMapBuilder(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts, int64_t tokens_a_range,
                const ForEach& for_each);
  // Writes offsets [T + 1] and expert_counts [E], the rows of each expert, and returns R.
  int64_t count(int64_t* offsets, int64_t* expert_counts);
  // Writes rows, experts and sources [R], where sources[row] is the token of a row; once, after count.
  void fill(int64_t* rows, int32_t* experts, int64_t* sources);

 private:
  template <typename Body>
  void for_ranges(const Body& body);  // body(first token, end, the range's numbers of experts)

  const uint8_t* routing_map_;
  int64_t num_tokens_, num_experts_, range_, num_ranges_;
  const ForEach& for_each_;
  std::vector<int64_t> of_ranges_;  // [ranges, E]: tokens, then the next row
  const int64_t* offsets_ = nullptr;
};

// The whole map at once for drop-and-pad, over all tokens: every expert owns `capacity` rows (<= T), the tokens routed
// to it first, then, where they are fewer, the lowest tokens not routed to it (a stable descending sort of its column).
// offsets: [T + 1]; rows, experts and sources: [E * capacity].
void build_padded_row_map(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts, int64_t capacity,
                          int64_t* offsets, int64_t* rows, int32_t* experts, int64_t* sources);

// The rows [R] of a map whose experts own expert_counts [E] rows, in chunk order: each expert's rows are cut into
// num_chunks > 0 parts, part c of n rows is [n * c / num_chunks, n * (c + 1) / num_chunks), and chunk c is part c of
// all experts, in expert order. A row that is none of its expert's, because it is left over, keeps its number.
void cut_rows(const int64_t* rows, const int32_t* experts, const int64_t* expert_counts, int64_t num_rows,
              int64_t num_experts, int64_t num_chunks, int64_t* cut);

// Builds offsets [T + 1] and rows [R] from sources [R], the token of each permuted row. Where experts is not null it
// gets row / rows_per_expert of each entry. Returns the first row whose source is outside [0, T), or -1 if none is;
// in the former case the outputs hold nothing useful.
int64_t build_row_map_from_sources(const int64_t* sources, int64_t num_rows, int64_t num_tokens,
                                   int64_t rows_per_expert, int64_t* offsets, int64_t* rows, int32_t* experts);

}  // namespace cpu

namespace cuda {

// As in cpu, on `stream` (a cudaStream_t). All pointers are device pointers.

// Bytes of scratch memory that build_row_map needs.
int64_t row_map_scratch_bytes(int64_t num_tokens, int64_t num_experts);

// Builds offsets [T + 1], rows, experts and sources [up to max_rows] and expert_counts [E] from routing_map.
// Rows at or past max_rows are not written and are no entries: offsets[T] <= max_rows; expert_counts count them, too.
// Where there are fewer, entries that no token owns are left over, and name the rows left over, each its own, and zeros
// as their experts and as the sources of these rows.
// With a capacity, drop-and-pad as in cpu::build_padded_row_map; max_rows is then not read, expert_counts not written.
void build_row_map(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts, int64_t max_rows,
                   std::optional<int64_t> capacity, int64_t* offsets, int64_t* rows, int32_t* experts, int64_t* sources,
                   int64_t* expert_counts, void* scratch, void* stream);

// As in cpu.
void cut_rows(const int64_t* rows, const int32_t* experts, const int64_t* expert_counts, int64_t num_rows,
              int64_t num_experts, int64_t num_chunks, int64_t* cut, void* stream);

// Bytes of scratch memory that build_row_map_from_sources needs.
int64_t sources_scratch_bytes(int64_t num_rows, int64_t num_tokens);

// As in cpu; sources outside [0, T) are the caller's to refuse. Deterministic.
void build_row_map_from_sources(const int64_t* sources, int64_t num_rows, int64_t num_tokens, int64_t rows_per_expert,
                                int64_t* offsets, int64_t* rows, int32_t* experts, void* scratch, void* stream);

}  // namespace cuda
}  // namespace moe_opt
