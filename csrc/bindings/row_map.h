// Row maps and routing maps as arguments.
#pragma once

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

// As for_row_ranges, for ranges of the tokens, whose rows are of row_bytes.
template <typename F>
void for_token_ranges(const RowMap& map, int64_t row_bytes, const F& body) {
  const int64_t rows_per_token = map.num_tokens > 0 ? map.num_rows / map.num_tokens + 1 : 1;
  for_row_ranges(map.num_tokens, bounded_product(row_bytes, rows_per_token), body);
}

}  // namespace moe_opt
