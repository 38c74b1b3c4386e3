#include "bindings/row_map.h"

#include <ATen/ops/count_nonzero.h>

#include "bindings/module.h"

namespace moe_opt {
namespace {

constexpr int64_t kMapBytesPerTask = 16 * 1024;  // of a routing map: least work worth a thread

// Every index is checked on CPU, where that costs next to nothing; on CUDA it would cost a synchronisation.
void check_indices(const RowMap& map, int64_t num_entries, int64_t num_places) {
  bool ok = map.offsets[0] == 0 && map.offsets[map.num_tokens] == num_entries;
  for (int64_t t = 0; t < map.num_tokens; ++t) ok &= map.offsets[t] <= map.offsets[t + 1];
  check(ok, "row map: offsets must rise from 0 to the number of rows, ", num_entries);
  for (int64_t i = 0; i < num_entries; ++i) ok &= static_cast<uint64_t>(map.rows[i]) < uint64_t(num_places);
  check(ok, "row map: a row is outside [0, ", num_places, ")");
  for (int64_t i = 0; i < num_entries && map.experts != nullptr; ++i) {
    ok &= map.experts[i] >= 0 && map.experts[i] < map.num_experts;
  }
  check(ok, "row map: an expert is outside [0, ", map.num_experts, ")");
}

// offsets, rows, experts, sources, expert_counts. known_rows: used on CUDA alone.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> build_row_map(const Input<"routing_map">& routing_map,
                                                                 std::optional<Size<"num_out_tokens">> known_rows) {
  check_routing_map(routing_map);
  const int64_t num_tokens = routing_map.size(0), num_experts = routing_map.size(1);
  const auto* bytes = static_cast<const uint8_t*>(routing_map.const_data_ptr());
  const auto make = [&](int64_t size, ScalarType dtype) { return empty_like({size}, dtype, routing_map); };
  Tensor offsets = make(num_tokens + 1, ScalarType::Long), expert_counts = make(num_experts, ScalarType::Long);
  Tensor rows, experts, sources;
  const auto make_entries = [&](int64_t num_rows) {
    rows = make(num_rows, ScalarType::Long);
    experts = make(num_rows, ScalarType::Int);
    sources = make(num_rows, ScalarType::Long);
  };
  MOE_OPT_IF_CUDA(routing_map, {
    const int64_t num_rows =  // the one host sync
        known_rows ? known_rows->value : at::count_nonzero(routing_map.view(ScalarType::Byte)).item<int64_t>();
    make_entries(num_rows);
    Tensor scratch = make(cuda::row_map_scratch_bytes(num_tokens, num_experts), ScalarType::Byte);
    cuda::build_row_map(bytes, num_tokens, num_experts, num_rows, std::nullopt, offsets.mutable_data_ptr<int64_t>(),
                        rows.mutable_data_ptr<int64_t>(), experts.mutable_data_ptr<int32_t>(),
                        sources.mutable_data_ptr<int64_t>(), expert_counts.mutable_data_ptr<int64_t>(),
                        scratch.mutable_data_ptr(), call.stream);
  }) {
    const int64_t range = std::max<int64_t>((num_tokens + at::get_num_threads() - 1) / at::get_num_threads(),
                                            kMapBytesPerTask / std::max<int64_t>(1, num_experts) + 1);
    cpu::RowMapBuilder builder(bytes, num_tokens, num_experts, range, for_each_on_threads);
    make_entries(builder.count(offsets.mutable_data_ptr<int64_t>(), expert_counts.mutable_data_ptr<int64_t>()));
    builder.fill(rows.mutable_data_ptr<int64_t>(), experts.mutable_data_ptr<int32_t>(),
                 sources.mutable_data_ptr<int64_t>());
  }
  return {offsets, rows, experts, sources, expert_counts};
}

// offsets, rows, experts, sources of drop-and-pad.
std::tuple<Tensor, Tensor, Tensor, Tensor> build_padded_row_map(const Input<"routing_map">& routing_map,
                                                                Size<"capacity"> capacity) {
  check_routing_map(routing_map);
  const int64_t num_tokens = routing_map.size(0), num_experts = routing_map.size(1);
  check(capacity <= num_tokens, "capacity ", capacity, " must lie in [0, ", num_tokens, "], the number of tokens");
  const auto make = [&](int64_t size, ScalarType dtype) { return empty_like({size}, dtype, routing_map); };
  Tensor offsets = make(num_tokens + 1, ScalarType::Long), rows = make(num_experts * capacity, ScalarType::Long);
  Tensor experts = make(rows.numel(), ScalarType::Int), sources = make(rows.numel(), ScalarType::Long);
  const auto* bytes = static_cast<const uint8_t*>(routing_map.const_data_ptr());
  int64_t *offsets_data = offsets.mutable_data_ptr<int64_t>(), *rows_data = rows.mutable_data_ptr<int64_t>();
  int32_t* experts_data = experts.mutable_data_ptr<int32_t>();
  int64_t* sources_data = sources.mutable_data_ptr<int64_t>();
  MOE_OPT_IF_CUDA(routing_map, {
    Tensor scratch = make(cuda::row_map_scratch_bytes(num_tokens, num_experts), ScalarType::Byte);
    cuda::build_row_map(bytes, num_tokens, num_experts, rows.numel(), capacity, offsets_data, rows_data, experts_data,
                        sources_data, nullptr, scratch.mutable_data_ptr(), call.stream);
  }) {
    cpu::build_padded_row_map(bytes, num_tokens, num_experts, capacity, offsets_data, rows_data, experts_data,
                              sources_data);
  }
  return {offsets, rows, experts, sources};
}

// The rows of the map in chunk order.
Tensor cut_rows(const RowMapTensors& row_map, const Input<"expert_counts">& expert_counts,
                Size<"num_chunks"> num_chunks) {
  const auto& rows = std::get<1>(row_map);
  const RowMap map = view(row_map, rows.device());
  check_index(expert_counts, rows.device());
  check(std::get<2>(row_map).has_value() && expert_counts.numel() == map.num_experts,
        "expert_counts must be those of a row map's experts");
  check(num_chunks >= 1 && num_chunks <= INT32_MAX && bounded_product(map.num_rows, num_chunks) <= kMostBytes,
        map.num_rows, " rows cannot be cut into ", num_chunks.value, " chunks");
  const int64_t* counts = expert_counts.const_data_ptr<int64_t>();
  Tensor cut = empty_like({map.num_rows}, ScalarType::Long, rows);
  int64_t* cut_data = cut.mutable_data_ptr<int64_t>();
  MOE_OPT_IF_CUDA(rows, {
    cuda::cut_rows(map.rows, map.experts, counts, map.num_rows, map.num_experts, num_chunks, cut_data, call.stream);
  }) {
    int64_t left = map.num_rows;
    for (int64_t e = 0; e < map.num_experts; ++e) {
      check(counts[e] >= 0 && counts[e] <= left, "expert_counts: not of ", map.num_rows, " rows");
      left -= counts[e];
    }
    cpu::cut_rows(map.rows, map.experts, counts, map.num_rows, map.num_experts, num_chunks, cut_data);
  }
  return cut;
}

// offsets, rows, experts. rows_per_expert == 0: no experts.
std::tuple<Tensor, Tensor, OptionalTensor> build_row_map_from_sources(const Input<"sorted_indices">& sources,
                                                                      Size<"num_tokens"> num_tokens,
                                                                      Size<"rows_per_expert"> rows_per_expert) {
  check_index(sources, sources.device());
  const int64_t num_rows = sources.numel();
  Tensor offsets = empty_like({num_tokens + 1}, ScalarType::Long, sources);
  Tensor rows = empty_like({num_rows}, ScalarType::Long, sources);
  OptionalTensor experts;
  if (rows_per_expert > 0) experts = empty_like({num_rows}, ScalarType::Int, sources);
  int32_t* experts_data = experts ? experts->mutable_data_ptr<int32_t>() : nullptr;
  const int64_t* sources_data = sources.const_data_ptr<int64_t>();
  int64_t* offsets_data = offsets.mutable_data_ptr<int64_t>();
  int64_t* rows_data = rows.mutable_data_ptr<int64_t>();
  MOE_OPT_IF_CUDA(sources, {
    Tensor scratch = empty_like({cuda::sources_scratch_bytes(num_rows, num_tokens)}, ScalarType::Byte, sources);
    cuda::build_row_map_from_sources(sources_data, num_rows, num_tokens, rows_per_expert, offsets_data, rows_data,
                                     experts_data, scratch.mutable_data_ptr(), call.stream);
  }) {
    const int64_t bad = cpu::build_row_map_from_sources(sources_data, num_rows, num_tokens, rows_per_expert,
                                                        offsets_data, rows_data, experts_data);
    check(bad < 0, "sorted_indices[", bad, "] is ", bad < 0 ? 0 : sources_data[bad], ", outside [0, ", num_tokens,
          "), the number of tokens");
  }
  return {offsets, rows, experts};
}

}  // namespace

RowMap view(const RowMapTensors& tensors, const at::Device& device, std::optional<int64_t> num_places) {
  const auto& [offsets, rows, experts, num_experts] = tensors;
  check_index(offsets, device);
  check_index(rows, device);
  check(offsets.numel() >= 1, "row_map.offsets is empty");
  RowMap map{offsets.numel() - 1,
             num_experts,
             rows.numel(),
             offsets.const_data_ptr<int64_t>(),
             rows.const_data_ptr<int64_t>(),
             nullptr};
  if (experts.has_value()) {
    check_tensor(*experts, 1, device);
    check(experts->scalar_type() == ScalarType::Int && experts->numel() == rows.numel(),
          "row_map.experts must be int32 with one entry for each row");
    map.experts = experts->const_data_ptr<int32_t>();
  }
  const int64_t places = num_places.value_or(map.num_rows);
  check(places >= map.num_rows, "row map: ", map.num_rows, " rows, but there are ", places);
  if (device.is_cpu()) check_indices(map, rows.numel(), places);
  return map;
}

void check_routing_map(const Argument& routing_map) {
  check_tensor(routing_map, 2, routing_map.device());
  check(routing_map.scalar_type() == ScalarType::Bool, "routing_map must be bool, but is ", routing_map.scalar_type());
  check(routing_map.size(1) <= INT32_MAX, "routing_map has too many experts: ", routing_map.size(1));
}

void bind_row_map(py::module_& m) {
  define(m, "build_row_map", build_row_map, NoGil());
  define(m, "build_padded_row_map", build_padded_row_map, NoGil());
  define(m, "cut_rows", cut_rows, NoGil());
  define(m, "build_row_map_from_sources", build_row_map_from_sources, NoGil());
}

}  // namespace moe_opt
