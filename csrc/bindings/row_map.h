// Row maps and routing maps as arguments.
#pragma once

#include <algorithm>
#include <tuple>

#include "bindings/tensors.h"
#include "kernels/row_map.h"

namespace moe_opt {

// offsets, rows, experts (or None) and the number of experts, as RowMap in kernels/row_map.py keeps them.
using RowMapTensors = std::tuple<Input<"row_map.offsets">, Input<"row_map.rows">, OptionalInput<"row_map.experts">,
                                 Size<"row_map.num_experts">>;

// num_places: how many rows there are, where those of the map may lie among others; default: they are all.
RowMap view(const RowMapTensors& tensors, const at::Device& device, std::optional<int64_t> num_places = std::nullopt);

void check_routing_map(const Argument& routing_map);

// Calls body(begin, end) for ranges of the tokens, on several threads where their rows of row_bytes are worth it.
template <typename F>
void for_token_ranges(const RowMap& map, int64_t row_bytes, const F& body) {
  const int64_t rows_per_token = map.num_tokens > 0 ? map.num_rows / map.num_tokens + 1 : 1;
  const int64_t token_bytes = std::max<int64_t>(1, bounded_product(row_bytes, rows_per_token));
  const int64_t grain = std::max<int64_t>(1, kBytesPerTask / token_bytes);
  at::parallel_for(0, map.num_tokens, grain, body);
}

}  // namespace moe_opt
