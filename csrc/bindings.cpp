// The Python module megatron_moe_opt._C: checks that arguments (bindings/arguments.h) fit together, turns them into
// pointers, and calls the kernels, on CPU split over PyTorch's threads, on CUDA on the current stream. Users call the
// faces in megatron_moe_opt/kernels.
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#ifdef MOE_OPT_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "assignment/sample_placement.h"
#include "assignment/transportation.h"
#include "bindings/arguments.h"
#include "kernels/chunk_copy.h"
#include "kernels/count_tokens.h"
#include "kernels/cpu_dispatch.h"
#include "kernels/host_pool.h"
#include "kernels/permute.h"
#include "kernels/residual_codec.h"
#include "kernels/sum_parts.h"
#include "pipeline/exchange.h"
#include "pipeline/executor.h"
#include "pipeline/uncaught_exception.h"
#ifdef MOE_OPT_CUDA
#include "pipeline/cuda_streams.h"
#include "pipeline/stream_executor.h"
#endif
#include "planning/exchange_plan.h"

namespace py = pybind11;

namespace moe_opt {
namespace {

using at::ScalarType;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
template <Name kName>
using OptionalInput = std::optional<Input<kName>>;

constexpr int64_t kLaneBytes = 16;               // of a packed row, behind its elements; holds the probability
constexpr int64_t kBytesPerTask = 64 * 1024;     // least work worth a thread
constexpr int64_t kMostChunks = 1 << 16;         // that an exchange is cut into
constexpr int64_t kMostBlocks = 1 << 22;         // of all its chunks
constexpr int64_t kMostRows = int64_t{1} << 40;  // of a rank for an expert: sums over ranks and chunks stay in range
constexpr int64_t kMapBytesPerTask = 16 * 1024;  // the same for routing maps

// ---- Tensors ----

Tensor empty(at::IntArrayRef shape, ScalarType dtype, at::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  const int64_t bytes = checked_bytes(shape, static_cast<int64_t>(c10::elementSize(dtype)), "empty");
  if (!device.is_cpu() || bytes == 0 || c10::isQIntType(dtype)) return at::empty(shape, options);
  void* block = host_pool::allocate(bytes);
  return at::from_blob(block, shape, host_pool::release, options);
}

Tensor empty_like(at::IntArrayRef shape, ScalarType dtype, const Tensor& like) {
  return empty(shape, dtype, like.device());
}

DType kernel_dtype(ScalarType dtype, const char* name) {
  switch (dtype) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      check(false, name, " is ", dtype, ": only float32, bfloat16 and float16 are supported");
      return DType::kFloat32;
  }
}

DType kernel_dtype(const Argument& tensor) { return kernel_dtype(tensor.scalar_type(), tensor.name); }

void check_contiguous(const Argument& tensor) {
  check(tensor.is_contiguous(), tensor.name, " of shape ", tensor.sizes(), " and strides ", tensor.strides(),
        " is not contiguous: pass ", tensor.name, ".contiguous()");
}

void check_tensor(const Argument& tensor, int64_t dim, const at::Device& device) {
  check(tensor.dim() == dim, tensor.name, " must have ", dim, " dimension(s), but its shape is ", tensor.sizes());
  check_contiguous(tensor);
  check(tensor.device() == device, tensor.name, " is on ", tensor.device(), " but must be on ", device);
}

void check_index(const Argument& tensor, const at::Device& device) {
  check_tensor(tensor, 1, device);
  check(tensor.scalar_type() == ScalarType::Long, tensor.name, " must be int64, but is ", tensor.scalar_type());
}

int64_t prob_size(ScalarType dtype) {
  const bool known = dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ||
                     dtype == ScalarType::Double;
  check(known, "probs are ", dtype, ": only float32, bfloat16, float16 and float64 are supported");
  return static_cast<int64_t>(c10::elementSize(dtype));
}

ConstRows const_rows(const Tensor& rows, int64_t first_byte = 0) {
  const int64_t stride_bytes = (rows.dim() == 2 ? rows.size(1) : 1) * rows.element_size();
  return {static_cast<const uint8_t*>(rows.const_data_ptr()) + first_byte, stride_bytes};
}

MutableRows mutable_rows(const Tensor& rows, int64_t first_byte = 0) {
  return {static_cast<uint8_t*>(rows.mutable_data_ptr()) + first_byte, const_rows(rows).stride_bytes};
}

bool overlap(const Tensor& a, const Tensor& b) {
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
  return begin(a) < begin(b) + b.nbytes() && begin(b) < begin(a) + a.nbytes();
}

int64_t lane_elements(const Tensor& rows) { return kLaneBytes / rows.element_size(); }

#ifdef MOE_OPT_CUDA
// The device guard and stream of one call.
struct CudaCall {
  explicit CudaCall(const Tensor& tensor) : guard(tensor.device()) {}
  c10::cuda::CUDAGuard guard;
  void* stream = c10::cuda::getCurrentCUDAStream().stream();
};
#define MOE_OPT_IF_CUDA(tensor, ...) \
  if ((tensor).is_cuda()) {          \
    CudaCall call(tensor);           \
    __VA_ARGS__;                     \
  } else  // NOLINT
#else
#define MOE_OPT_IF_CUDA(tensor, ...)
#endif

// ---- Row maps ----

// offsets, rows, experts (or None) and the number of experts, as RowMap in kernels/row_map.py keeps them.
using RowMapTensors = std::tuple<Input<"row_map.offsets">, Input<"row_map.rows">, OptionalInput<"row_map.experts">,
                                 Size<"row_map.num_experts">>;

// Every index is checked on CPU, where that costs next to nothing; on CUDA it would cost a synchronisation.
void check_indices(const RowMap& map, int64_t num_entries) {
  bool ok = map.offsets[0] == 0 && map.offsets[map.num_tokens] == num_entries;
  for (int64_t t = 0; t < map.num_tokens; ++t) ok &= map.offsets[t] <= map.offsets[t + 1];
  check(ok, "row map: offsets must rise from 0 to the number of rows, ", num_entries);
  for (int64_t i = 0; i < num_entries; ++i) ok &= static_cast<uint64_t>(map.rows[i]) < uint64_t(map.num_rows);
  check(ok, "row map: a row is outside [0, ", map.num_rows, ")");
  for (int64_t i = 0; i < num_entries && map.experts != nullptr; ++i) {
    ok &= map.experts[i] >= 0 && map.experts[i] < map.num_experts;
  }
  check(ok, "row map: an expert is outside [0, ", map.num_experts, ")");
}

RowMap view(const RowMapTensors& tensors, const at::Device& device) {
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
  if (device.is_cpu()) check_indices(map, rows.numel());
  return map;
}

template <typename F>
void for_token_ranges(const RowMap& map, int64_t row_bytes, const F& body) {
  const int64_t rows_per_token = map.num_tokens > 0 ? map.num_rows / map.num_tokens + 1 : 1;
  const int64_t token_bytes = std::max<int64_t>(1, bounded_product(row_bytes, rows_per_token));
  const int64_t grain = std::max<int64_t>(1, kBytesPerTask / token_bytes);
  at::parallel_for(0, map.num_tokens, grain, body);
}

void check_routing_map(const Argument& routing_map) {
  check_tensor(routing_map, 2, routing_map.device());
  check(routing_map.scalar_type() == ScalarType::Bool, "routing_map must be bool, but is ", routing_map.scalar_type());
  check(routing_map.size(1) <= INT32_MAX, "routing_map has too many experts: ", routing_map.size(1));
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
    // Ranges of tokens are counted side by side; a scan in expert-major order gives each its first rows.
    const int64_t range = std::max<int64_t>((num_tokens + at::get_num_threads() - 1) / at::get_num_threads(),
                                            kMapBytesPerTask / std::max<int64_t>(1, num_experts) + 1);
    const int64_t num_ranges = (num_tokens + range - 1) / range;
    std::vector<int64_t> next_rows(num_ranges * num_experts, 0);
    int64_t* offset = offsets.mutable_data_ptr<int64_t>();
    const auto for_ranges = [&](auto&& body) {
      at::parallel_for(0, num_ranges, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          body(i * range, std::min(num_tokens, (i + 1) * range), next_rows.data() + i * num_experts);
        }
      });
    };
    for_ranges([&](int64_t begin, int64_t end, int64_t* counts) {
      cpu::count_routed(bytes, num_experts, begin, end, offset + 1, counts);
    });
    int64_t row = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      const int64_t first = row;
      for (int64_t i = 0; i < num_ranges; ++i) {
        const int64_t count = next_rows[i * num_experts + e];
        next_rows[i * num_experts + e] = row;
        row += count;
      }
      expert_counts.mutable_data_ptr<int64_t>()[e] = row - first;
    }
    offset[0] = 0;
    for (int64_t t = 0; t < num_tokens; ++t) offset[t + 1] += offset[t];
    make_entries(row);
    for_ranges([&](int64_t begin, int64_t end, int64_t* next_row) {
      cpu::fill_row_map(bytes, num_experts, begin, end, offset, next_row, rows.mutable_data_ptr<int64_t>(),
                        experts.mutable_data_ptr<int32_t>(), sources.mutable_data_ptr<int64_t>());
    });
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

// ---- Permute and unpermute ----

void check_probs(const Argument& probs, const RowMap& map, const at::Device& device) {
  check_tensor(probs, 2, device);
  check(probs.size(0) == map.num_tokens && probs.size(1) == map.num_experts, "probs have shape ", probs.sizes(),
        ", but the row map has ", map.num_tokens, " tokens and ", map.num_experts, " experts");
  check(map.experts != nullptr || map.num_rows == 0, "probs need a row map with experts");
}

void check_rows(const Argument& rows, int64_t num_rows, const at::Device& device) {
  check_tensor(rows, 2, device);
  kernel_dtype(rows);
  check(rows.size(0) == num_rows, rows.name, " has ", rows.size(0), " rows, but the row map has ", num_rows);
}

void run_permute(const RowMap& map, const Argument& tokens, const Tensor& permuted, const Argument* probs,
                 MutableRows permuted_probs, int64_t lane_bytes) {
  const DType dtype = kernel_dtype(tokens);
  const int64_t hidden = tokens.size(1);
  const void* probs_data = probs ? probs->const_data_ptr() : nullptr;
  const int64_t size = probs ? probs->element_size() : 0;
  MOE_OPT_IF_CUDA(tokens, cuda::permute_rows(map, dtype, hidden, const_rows(tokens), mutable_rows(permuted), probs_data,
                                             size, permuted_probs, lane_bytes, call.stream)) {
    for_token_ranges(map, hidden * tokens.element_size(), [&](int64_t begin, int64_t end) {
      cpu::permute_rows(map, dtype, hidden, const_rows(tokens), mutable_rows(permuted), probs_data, size,
                        permuted_probs, lane_bytes, begin, end);
    });
  }
}

// permuted [R, H] and, with probs, permuted probs [R].
std::tuple<Tensor, OptionalTensor> permute_rows(const RowMapTensors& row_map, const Input<"tokens">& tokens,
                                                const OptionalInput<"probs">& probs) {
  const RowMap map = view(row_map, tokens.device());
  check_rows(tokens, map.num_tokens, tokens.device());
  Tensor permuted = empty_like({map.num_rows, tokens.size(1)}, tokens.scalar_type(), tokens);
  OptionalTensor permuted_probs;
  MutableRows lanes{nullptr, 0};
  if (probs) {
    check_probs(*probs, map, tokens.device());
    prob_size(probs->scalar_type());
    permuted_probs = empty_like({map.num_rows}, probs->scalar_type(), tokens);
    lanes = mutable_rows(*permuted_probs);
  }
  run_permute(map, tokens, permuted, probs ? &*probs : nullptr, lanes, probs ? probs->element_size() : 0);
  return {permuted, permuted_probs};
}

// packed [R, H + lane].
Tensor permute_packed(const RowMapTensors& row_map, const Input<"tokens">& tokens, const Input<"probs">& probs) {
  const RowMap map = view(row_map, tokens.device());
  check_rows(tokens, map.num_tokens, tokens.device());
  check_probs(probs, map, tokens.device());
  prob_size(probs.scalar_type());
  const int64_t hidden = tokens.size(1);
  Tensor packed = empty_like({map.num_rows, hidden + lane_elements(tokens)}, tokens.scalar_type(), tokens);
  run_permute(map, tokens, packed, &probs, mutable_rows(packed, hidden * tokens.element_size()), kLaneBytes);
  return packed;
}

// tokens [T, hidden] from permuted [R, >= hidden].
Tensor unpermute_rows(const RowMapTensors& row_map, const Input<"permuted_tokens">& permuted, Size<"hidden"> hidden,
                      const OptionalInput<"probs">& probs) {
  const at::Device device = permuted.device();
  const RowMap map = view(row_map, device);
  check_rows(permuted, map.num_rows, device);
  check(hidden <= permuted.size(1), "hidden size ", hidden, " does not fit permuted_tokens of shape ",
        permuted.sizes());
  if (probs) {
    check_probs(*probs, map, device);
    check(probs->scalar_type() == ScalarType::Float, "unpermute_rows takes float32 probs");
  }
  const DType dtype = kernel_dtype(permuted);
  const float* probs_data = probs ? probs->const_data_ptr<float>() : nullptr;
  Tensor tokens = empty_like({map.num_tokens, hidden}, permuted.scalar_type(), permuted);
  MOE_OPT_IF_CUDA(permuted, cuda::unpermute_rows(map, dtype, hidden, const_rows(permuted), probs_data,
                                                 mutable_rows(tokens), call.stream)) {
    for_token_ranges(map, hidden * permuted.element_size(), [&](int64_t begin, int64_t end) {
      cpu::unpermute_rows(map, dtype, hidden, const_rows(permuted), probs_data, mutable_rows(tokens), begin, end);
    });
  }
  return tokens;
}

// grad_permuted [R, H] and grad_probs float32 [T, E].
std::tuple<Tensor, Tensor> unpermute_rows_backward(const RowMapTensors& row_map,
                                                   const Input<"grad_tokens">& grad_tokens,
                                                   const Input<"permuted_tokens">& permuted,
                                                   const Input<"probs">& probs) {
  const at::Device device = permuted.device();
  const RowMap map = view(row_map, device);
  check_rows(permuted, map.num_rows, device);
  check_rows(grad_tokens, map.num_tokens, device);
  check(grad_tokens.scalar_type() == permuted.scalar_type() && grad_tokens.size(1) == permuted.size(1),
        "grad_tokens and permuted_tokens differ in dtype or hidden size");
  check_probs(probs, map, device);
  check(probs.scalar_type() == ScalarType::Float, "unpermute_rows_backward takes float32 probs");
  const DType dtype = kernel_dtype(permuted);
  const int64_t hidden = permuted.size(1);
  Tensor grad_permuted = empty_like(permuted.sizes(), permuted.scalar_type(), permuted);
  Tensor grad_probs = empty_like(probs.sizes(), ScalarType::Float, permuted);
  const float* probs_data = probs.const_data_ptr<float>();
  float* grad_probs_data = grad_probs.mutable_data_ptr<float>();
  MOE_OPT_IF_CUDA(
      permuted, cuda::unpermute_rows_backward(map, dtype, hidden, const_rows(grad_tokens), const_rows(permuted),
                                              probs_data, mutable_rows(grad_permuted), grad_probs_data, call.stream)) {
    for_token_ranges(map, 2 * hidden * permuted.element_size(), [&](int64_t begin, int64_t end) {
      cpu::unpermute_rows_backward(map, dtype, hidden, const_rows(grad_tokens), const_rows(permuted), probs_data,
                                   mutable_rows(grad_permuted), grad_probs_data, begin, end);
    });
  }
  return {grad_permuted, grad_probs};
}

// grad_probs [T, E] from the gradient of permuted probs: [R], or the lanes behind `hidden` elements of packed rows.
Tensor unpermute_probs(const RowMapTensors& row_map, const Input<"grad_permuted_probs">& grad_rows,
                       Size<"hidden"> hidden, ScalarType dtype) {
  const at::Device device = grad_rows.device();
  const RowMap map = view(row_map, device);
  check(map.experts != nullptr || map.num_rows == 0, "probs need a row map with experts");
  check_tensor(grad_rows, grad_rows.dim() == 1 ? 1 : 2, device);
  const int64_t size = prob_size(dtype);
  const ConstRows lanes = const_rows(grad_rows, hidden * grad_rows.element_size());
  check(grad_rows.size(0) == map.num_rows && hidden * grad_rows.element_size() + size <= lanes.stride_bytes,
        "grad_permuted_probs of shape ", grad_rows.sizes(), " does not fit the row map's ", map.num_rows, " rows");
  Tensor grad_probs = empty_like({map.num_tokens, map.num_experts}, dtype, grad_rows);
  void* out = grad_probs.mutable_data_ptr();
  MOE_OPT_IF_CUDA(grad_rows, cuda::unpermute_probs(map, lanes, size, out, call.stream)) {
    for_token_ranges(map, size * map.num_experts,
                     [&](int64_t begin, int64_t end) { cpu::unpermute_probs(map, lanes, size, out, begin, end); });
  }
  return grad_probs;
}

// ---- Chunks ----

// source_rows, target_rows, row_counts and the number of rows, as ChunkList in kernels/chunk_copy.py keeps them.
using ChunkTensors = std::tuple<Input<"chunks.source_rows">, Input<"chunks.target_rows">, Input<"chunks.row_counts">,
                                Size<"chunks.num_rows">>;

ChunkList view(const ChunkTensors& tensors, const at::Device& device) {
  const auto& [sources, targets, counts, num_rows] = tensors;
  check_index(sources, device);
  check_index(targets, device);
  check_index(counts, device);
  check(sources.numel() == counts.numel() && targets.numel() == counts.numel(),
        "chunks: source_rows, target_rows and row_counts differ in length");
  return {counts.numel(), sources.const_data_ptr<int64_t>(), targets.const_data_ptr<int64_t>(),
          counts.const_data_ptr<int64_t>()};
}

// Whether chunks, on the host, move num_rows rows in all, from among source_rows to among target_rows.
void check_chunks(const ChunkList& chunks, int64_t num_rows, int64_t source_rows, int64_t target_rows) {
  int64_t total = 0;
  for (int64_t c = 0; c < chunks.num_chunks; ++c) {
    const int64_t count = chunks.row_counts[c], source = chunks.source_rows[c], target = chunks.target_rows[c];
    const bool inside = count >= 0 && count <= num_rows - total && count <= source_rows && source >= 0 &&
                        source <= source_rows - count && target >= 0 && target <= target_rows - count;
    check(inside, "chunk ", c, " (", count, " rows from ", source, " to ", target, ") is outside [0, ", source_rows,
          ") or [0, ", target_rows, "), or beyond ", num_rows, " rows in all");
    total += count;
  }
  check(total == num_rows, "the chunks have ", total, " rows together, not ", num_rows);
}

void run_copy_chunks(const ChunkList& chunks, const Tensor& on, int64_t num_rows, int64_t row_bytes, ConstRows source,
                     MutableRows target) {
  MOE_OPT_IF_CUDA(on, cuda::copy_chunks(chunks, num_rows, row_bytes, source.data, source.stride_bytes, target.data,
                                        target.stride_bytes, call.stream)) {
    const int64_t grain = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, row_bytes));
    at::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
      cpu::copy_chunks(chunks, row_bytes, source.data, source.stride_bytes, target.data, target.stride_bytes, begin,
                       end);
    });
  }
}

Tensor copy_chunks(const Input<"rows">& rows, const ChunkTensors& chunk_tensors) {
  check_tensor(rows, 2, rows.device());
  const int64_t num_rows = std::get<3>(chunk_tensors);
  check(rows.size(0) == num_rows, "the rows of shape ", rows.sizes(), " do not fit chunks of ", num_rows, " rows");
  const ChunkList chunks = view(chunk_tensors, rows.device());
  if (rows.is_cpu()) check_chunks(chunks, num_rows, num_rows, num_rows);
  Tensor out = empty_like(rows.sizes(), rows.scalar_type(), rows);
  run_copy_chunks(chunks, rows, rows.size(0), rows.size(1) * rows.element_size(), const_rows(rows), mutable_rows(out));
  return out;
}

// ---- Residual codec ----

void check_expert(const Argument& tensor, const Argument& like) {
  check_tensor(tensor, like.dim(), like.device());
  check(tensor.sizes() == like.sizes() && tensor.scalar_type() == like.scalar_type(), tensor.name, " is ",
        tensor.scalar_type(), " of shape ", tensor.sizes(), ", but ", like.name, " is ", like.scalar_type(),
        " of shape ", like.sizes());
  kernel_dtype(tensor);
  check(tensor.numel() <= kMaxCodecElements, tensor.name, " has ", tensor.numel(),
        " elements: the codec takes at most ", kMaxCodecElements, "; split it");
}

// values [k] and indices, uint16 [codec_index_words].
std::tuple<Tensor, Tensor> sr_encode(const Input<"expert">& expert, const Input<"shared">& shared, Size<"k"> k) {
  check_expert(expert, expert);
  check_expert(shared, expert);
  const int64_t numel = expert.numel();
  check(k <= numel, "k ", k, " must lie in [0, ", numel, "], the number of elements of the expert");
  const DType dtype = kernel_dtype(expert);
  Tensor values = empty_like({k}, expert.scalar_type(), expert);
  Tensor indices = empty_like({codec_index_words(numel, k)}, ScalarType::UInt16, expert);
  const void* expert_data = expert.const_data_ptr();
  const void* shared_data = shared.const_data_ptr();
  uint16_t* indices_data = indices.mutable_data_ptr<uint16_t>();
  MOE_OPT_IF_CUDA(expert, {
    Tensor scratch = empty_like({cuda::sr_encode_scratch_bytes(numel, k)}, ScalarType::Byte, expert);
    cuda::sr_encode(dtype, numel, expert_data, shared_data, k, values.mutable_data_ptr(), indices_data,
                    scratch.mutable_data_ptr(), call.stream);
  }) {
    const cpu::ForEach for_each = [](int64_t count, const std::function<void(int64_t)>& body) {
      at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) body(i);
      });
    };
    cpu::sr_encode(dtype, numel, expert_data, shared_data, k, values.mutable_data_ptr(), indices_data,
                   at::get_num_threads(), for_each);
  }
  return {values, indices};
}

// shared + residuals, in `out` if given.
Tensor sr_decode(const Input<"values">& values, const Input<"indices">& indices, const Input<"shared">& shared,
                 const std::optional<Buffer<"out">>& out) {
  check_expert(shared, shared);
  const at::Device device = shared.device();
  const int64_t numel = shared.numel(), k = values.numel();
  check_tensor(values, 1, device);
  check_tensor(indices, 1, device);
  check(values.scalar_type() == shared.scalar_type(), "values are ", values.scalar_type(), ", but shared is ",
        shared.scalar_type());
  check(indices.scalar_type() == ScalarType::UInt16, "indices must be uint16, but are ", indices.scalar_type());
  check(k <= numel && indices.numel() == codec_index_words(numel, k), values.numel(), " values with ", indices.numel(),
        " indices do not belong to an expert of shape ", shared.sizes());
  if (out) {
    check_expert(*out, shared);
    const bool apart = !overlap(*out, shared) && !overlap(*out, values) && !overlap(*out, indices);
    check(apart, "out shares memory with values, indices or shared");
  }
  const DType dtype = kernel_dtype(shared);
  Tensor expert = out ? Tensor(*out) : empty_like(shared.sizes(), shared.scalar_type(), shared);
  if (out) expert.unsafeGetTensorImpl()->bump_version();  // so that autograd sees that it was written
  void* expert_data = expert.mutable_data_ptr();
  const void* values_data = values.const_data_ptr();
  const uint16_t* indices_data = indices.const_data_ptr<uint16_t>();
  const void* shared_data = shared.const_data_ptr();
  MOE_OPT_IF_CUDA(shared,
                  cuda::sr_decode(dtype, numel, values_data, indices_data, k, shared_data, expert_data, call.stream)) {
    std::atomic<bool> ok{cpu::codec_ends_valid(numel, indices_data, k)};
    if (ok) {
      at::parallel_for(0, codec_blocks(numel), 1, [&](int64_t begin, int64_t end) {
        if (!cpu::sr_decode(dtype, numel, values_data, indices_data, shared_data, expert_data, begin, end)) ok = false;
      });
    }
    check(ok, "indices are not what sr_encode writes for an expert of shape ", shared.sizes());
  }
  return expert;
}

// ---- Placement of samples ----

// Rows of the routing, [I * L, ...], in samples.
SampleLayout sample_layout(const Argument& routing, int64_t num_samples, bool batch_first) {
  check_tensor(routing, 2, routing.device());
  const int64_t num_tokens = routing.size(0);
  check(num_samples > 0 && num_tokens % num_samples == 0, routing.name, " of shape ", routing.sizes(),
        " cannot be cut into ", num_samples, " samples of equal length");
  return {num_samples, num_tokens / num_samples, batch_first};
}

template <typename F>
void for_sample_ranges(const SampleLayout& layout, int64_t token_bytes, const F& body) {
  const int64_t sample_bytes = std::max<int64_t>(1, layout.tokens_per_sample * token_bytes);
  at::parallel_for(0, layout.num_samples, std::max<int64_t>(1, kBytesPerTask / sample_bytes), body);
}

// num [I, E] from experts [I * L, K].
Tensor count_topk(const Input<"experts">& experts, Size<"num_experts"> num_experts, Size<"num_samples"> num_samples,
                  bool batch_first) {
  const SampleLayout layout = sample_layout(experts, num_samples, batch_first);
  check(experts.scalar_type() == ScalarType::Long, "experts must be int64, but are ", experts.scalar_type());
  check(num_experts <= INT32_MAX, "the number of experts, ", num_experts, ", is out of range");
  const int64_t topk = experts.size(1);
  check(layout.tokens_per_sample * topk <= INT32_MAX, "a sample has 2^31 or more routed pairs");
  Tensor num = empty_like({num_samples, num_experts}, ScalarType::Long, experts);
  if (num.numel() == 0 || experts.numel() == 0) return num.zero_();  // however many rows of nothing there are
  const int64_t* data = experts.const_data_ptr<int64_t>();
  int64_t* out = num.mutable_data_ptr<int64_t>();
  MOE_OPT_IF_CUDA(experts, cuda::count_topk(layout, data, topk, num_experts, out, call.stream)) {
    std::atomic<bool> valid{true};
    for_sample_ranges(layout, topk * experts.element_size(), [&](int64_t begin, int64_t end) {
      if (!cpu::count_topk(layout, data, topk, num_experts, out, begin, end)) valid = false;
    });
    check(valid, "experts holds an index outside [0, ", num_experts, "), the number of experts");
  }
  return num;
}

// num [I, E] from routing_map [I * L, E].
Tensor count_routing_map(const Input<"routing_map">& routing_map, Size<"num_samples"> num_samples, bool batch_first) {
  check_routing_map(routing_map);
  const SampleLayout layout = sample_layout(routing_map, num_samples, batch_first);
  const int64_t num_experts = routing_map.size(1);
  Tensor num = empty_like({num_samples, num_experts}, ScalarType::Long, routing_map);
  if (num.numel() == 0 || routing_map.numel() == 0) return num.zero_();
  const auto* bytes = static_cast<const uint8_t*>(routing_map.const_data_ptr());
  int64_t* out = num.mutable_data_ptr<int64_t>();
  MOE_OPT_IF_CUDA(routing_map, cuda::count_routing_map(layout, bytes, num_experts, out, call.stream)) {
    for_sample_ranges(layout, num_experts, [&](int64_t begin, int64_t end) {
      cpu::count_routing_map(layout, bytes, num_experts, out, begin, end);
    });
  }
  return num;
}

// Calls solve(values) with costs or counts as int64_t or double.
template <typename Solve>
void with_numbers(const Argument& tensor, const Solve& solve) {
  check_tensor(tensor, 2, at::kCPU);
  if (tensor.scalar_type() == ScalarType::Long) return solve(tensor.const_data_ptr<int64_t>());
  check(tensor.scalar_type() == ScalarType::Double, tensor.name, " must be int64 or float64, but is ",
        tensor.scalar_type());
  solve(tensor.const_data_ptr<double>());
}

// The sink of each sample: [I] from cost [I, N] and capacity [N].
Tensor solve_placement(const Input<"cost">& cost, const Input<"capacity">& capacity) {
  check_index(capacity, at::kCPU);
  Tensor sink_of;
  with_numbers(cost, [&](const auto* values) {
    sink_of = empty_like({cost.size(0)}, ScalarType::Long, cost);
    check(capacity.numel() == cost.size(1), "capacity has ", capacity.numel(), " entries, but cost of shape ",
          cost.sizes(), " has ", cost.size(1), " sinks");
    assignment::place(values, cost.size(0), cost.size(1), capacity.const_data_ptr<int64_t>(),
                      sink_of.mutable_data_ptr<int64_t>());
  });
  return sink_of;
}

// The device of each sample: [I] from num [I, E], expert_device [E], device_node [J] and capacity [J], or as many on
// each.
Tensor place_samples(const Input<"num">& num, const Input<"expert_device">& expert_device,
                     const Input<"device_node">& device_node, const OptionalInput<"capacity">& capacity) {
  constexpr int64_t kCostsPerTask = 16 * 1024;  // of a second-stage problem that is worth a thread
  check_index(expert_device, at::kCPU);
  check_index(device_node, at::kCPU);
  Tensor device_of;
  with_numbers(num, [&](const auto* values) {
    const int64_t num_samples = num.size(0), num_experts = num.size(1), num_devices = device_node.numel();
    check(expert_device.numel() == num_experts, "expert_device has ", expert_device.numel(),
          " entries, but num of shape ", num.sizes(), " has ", num_experts, " experts");
    std::vector<int64_t> equal;
    if (capacity) {
      check_index(*capacity, at::kCPU);
      check(capacity->numel() == num_devices, "capacity has ", capacity->numel(), " entries, but device_node has ",
            num_devices);
    } else {
      check(num_devices > 0 && num_samples % num_devices == 0, num_samples, " samples do not divide among ",
            num_devices, " devices: pass their capacity");
      equal.assign(num_devices, num_samples / num_devices);
    }
    const int64_t* node_of = device_node.const_data_ptr<int64_t>();
    const int64_t last_node = num_devices > 0 ? *std::max_element(node_of, node_of + num_devices) : -1;
    check(-1 <= last_node && last_node < num_devices, "device_node holds node ", last_node, ", but there are only ",
          num_devices, " devices: count the nodes from 0");
    const int64_t num_nodes = last_node + 1;
    check(num_samples <= INT32_MAX, "num of shape ", num.sizes(), " has more than 2^31 - 1 samples");
    const assignment::Cluster cluster{num_experts, num_devices,
                                      num_nodes,   expert_device.const_data_ptr<int64_t>(),
                                      node_of,     capacity ? capacity->const_data_ptr<int64_t>() : equal.data()};
    const assignment::SamplePlacement placement(values, num_samples, cluster);
    device_of = empty_like({num_samples}, ScalarType::Long, num);
    const int64_t node_costs = num_samples * num_devices / std::max<int64_t>(1, num_nodes * num_nodes);
    const int64_t grain = kCostsPerTask / std::max<int64_t>(1, node_costs) + 1;
    at::parallel_for(0, num_nodes, grain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) placement.place_on_devices(n, device_of.mutable_data_ptr<int64_t>());
    });
  });
  return device_of;
}

// ---- The plan of an exchange ----

// (chunks, tokens_per_expert int64 [local] or [chunks, local]): see planning/exchange_plan.h. counts is int64
// [EP, ETP, E]. A chunk is what runtime/exchange_plan.py's ChunkPlan is made of: (sent, arriving, etp rank, the list
// that moves its blocks on `device` with the number of its rows, first row sent, received, gathered).
py::tuple plan_exchange(const Input<"counts">& of_ranks, Size<"ep_rank"> ep_rank, Size<"etp_rank"> etp_rank,
                        Size<"num_chunks"> num_chunks, bool together, at::Device device) {
  check(of_ranks.dim() == 3 && of_ranks.scalar_type() == ScalarType::Long && of_ranks.is_cpu(),
        "counts must be int64 [ep, etp, experts] on the CPU");
  const Tensor counts = of_ranks.contiguous();
  const int64_t ep_size = counts.size(0), etp_size = counts.size(1), experts = counts.size(2);
  check(ep_size > 0 && etp_size > 0 && experts % ep_size == 0, experts, " experts do not divide among ", ep_size,
        " ranks");
  check(ep_rank < ep_size && etp_rank < etp_size, "no rank (", ep_rank, ", ", etp_rank, ") among ", ep_size, " x ",
        etp_size);
  check(num_chunks >= 1 && num_chunks <= kMostChunks, num_chunks, " chunks: give a number from 1 to ", kMostChunks);
  const int64_t ranks = bounded_product(ep_size, etp_size), of_rank_blocks = std::max<int64_t>(1, experts / ep_size);
  check(bounded_product(bounded_product(ranks, of_rank_blocks), num_chunks) <= kMostBlocks, num_chunks,
        " chunks of counts of shape ", counts.sizes(), " are more than ", kMostBlocks, " blocks");
  const int64_t* rows = counts.const_data_ptr<int64_t>();
  check(std::all_of(rows, rows + counts.numel(), [](int64_t n) { return 0 <= n && n <= kMostRows; }),
        "counts holds a number of rows outside [0, ", kMostRows, "]");
  const planning::Counts of_rank{rows, ep_size, etp_size, experts / ep_size, ep_rank, etp_rank};
  // Pinned and not waited for: a copy from pageable memory waits for all that is queued on the stream.
  const auto options = at::TensorOptions().dtype(ScalarType::Long);
  const int64_t blocks = planning::num_blocks(of_rank, num_chunks);
  Tensor lists = at::empty({3, blocks}, options.pinned_memory(device.is_cuda()));
  Tensor tokens = together ? at::empty({of_rank.local}, options) : at::empty({num_chunks, of_rank.local}, options);
  int64_t* list = lists.mutable_data_ptr<int64_t>();
  planning::ExchangePlan plan = planning::plan_exchange(of_rank, num_chunks, together, list, list + blocks,
                                                        list + 2 * blocks, tokens.mutable_data_ptr<int64_t>());
  if (!device.is_cpu()) lists = lists.to(device, /*non_blocking=*/true);
  const auto sum = [](const std::vector<int64_t>& numbers) {
    return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
  };
  const int64_t of_chunk = blocks / num_chunks;
  int64_t first_sent = 0, first_received = 0, first_gathered = 0;
  py::list chunks(num_chunks.value);
  for (int64_t c = 0; c < num_chunks; ++c) {
    const auto& arriving = plan.arriving[c];
    int64_t gathered = 0;
    for (const auto& of_peer : arriving) gathered += sum(of_peer);
    const auto part = [&](int64_t which) { return lists.as_strided({of_chunk}, {1}, which * blocks + c * of_chunk); };
    chunks[c] =
        py::make_tuple(plan.sent[c], arriving, etp_rank.value, py::make_tuple(part(0), part(1), part(2), gathered),
                       first_sent, first_received, first_gathered);
    if (!together) continue;
    first_sent += sum(plan.sent[c]);
    first_received += sum(arriving[etp_rank]);
    first_gathered += gathered;
  }
  return py::make_tuple(chunks, tokens);
}

// ---- Pipelines ----

using pipeline::Action;
using ActionPtr = std::shared_ptr<Action>;

// An action that is a function, with whatever it holds.
template <typename Function>
ActionPtr make_action(Function function) {
  struct FunctionAction : Action {
    explicit FunctionAction(Function function) : function(std::move(function)) {}
    void run() override { function(); }
    Function function;
  };
  return std::make_shared<FunctionAction>(std::move(function));
}

// Has what waits for a send or a receive of Gloo's return: a wait that has not begun yet is not ended.
void abort_work(const c10::intrusive_ptr<c10d::Work>& work) {
  check(work.defined(), "no work to abort");
  work->abort();
}

// Rows [first, first + count) for each rank of the group.
using RowBlocks = std::vector<std::pair<Size<"first row">, Size<"number of rows">>>;

std::vector<Tensor> row_blocks(const Memory& memory, const char* name, const RowBlocks& blocks) {
  const Tensor& rows = memory.tensor();
  std::vector<Tensor> views;
  views.reserve(blocks.size());
  for (const auto& [first, count] : blocks) {
    check(first + count <= rows.size(0), name, ": rows [", first, ", ", first + count, ") are outside [0, ",
          rows.size(0), ")");
    views.push_back(rows.narrow(0, first, count));
  }
  return views;
}

ActionPtr exchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Buffer<"sent">& sent,
                   const RowBlocks& sent_blocks, const Buffer<"received">& received, const RowBlocks& received_blocks) {
  struct CheckedExchange : pipeline::Exchange {
    CheckedExchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Memory& sent,
                    const RowBlocks& sent_blocks, const Memory& received, const RowBlocks& received_blocks)
        : Exchange(group, row_blocks(sent, "sent", sent_blocks), row_blocks(received, "received", received_blocks)),
          sent(sent),
          received(received) {}
    void run() override {
      check(!ran.exchange(true), "an exchange was run before: make a new one, as its peers do");
      sent.tensor(), received.tensor();  // still there
      Exchange::run();
    }
    const Memory sent, received;
    std::atomic<bool> ran{false};
  };
  check(group.defined(), "an exchange needs a process group, not None");
  check_contiguous(sent);
  check_contiguous(received);
  check(sent.device() == received.device() && sent.scalar_type() == received.scalar_type() && sent.dim() >= 1 &&
            received.dim() >= 1 && sent.sizes().slice(1) == received.sizes().slice(1),
        "an exchange's rows must have one dtype, device and width, but are ", sent.sizes(), " and ", received.sizes());
  const size_t rank = group->getRank();
  check(rank < std::min(sent_blocks.size(), received_blocks.size()) &&
            sent_blocks[rank].second == received_blocks[rank].second,
        "an exchange needs one block to and one from each of the ", group->getSize(),
        " ranks, the same number of rows to and from itself");
  return std::make_shared<CheckedExchange>(group, Memory(sent), sent_blocks, Memory(received), received_blocks);
}

void check_row_matrix(const Argument& rows) {
  check(rows.dim() == 1 || rows.dim() == 2, rows.name, " must have 1 or 2 dimensions, but its shape is ", rows.sizes());
  check_contiguous(rows);
}

// Chunks that an action keeps: on the CPU a copy, which stays as it was checked.
class KeptChunks {
 public:
  KeptChunks(const ChunkTensors& tensors, int64_t source_rows, int64_t target_rows, const at::Device& device)
      : num_rows_(std::get<3>(tensors)) {
    const ChunkList given = view(tensors, device);
    num_chunks_ = given.num_chunks;
    if (!device.is_cpu()) {
      const auto& [sources, targets, counts, num_rows] = tensors;
      on_device_ = {Memory(sources), Memory(targets), Memory(counts)};
      return;
    }
    for (const int64_t* numbers : {given.source_rows, given.target_rows, given.row_counts}) {
      on_host_.insert(on_host_.end(), numbers, numbers + num_chunks_);
    }
    check_chunks(list(), num_rows_, source_rows, target_rows);
  }

  int64_t num_rows() const { return num_rows_; }

  ChunkList list() const {
    const auto numbers = [&](int64_t which) {
      return on_device_.empty() ? on_host_.data() + which * num_chunks_
                                : static_cast<const int64_t*>(on_device_[which].data());
    };
    return {num_chunks_, numbers(0), numbers(1), numbers(2)};
  }

 private:
  int64_t num_rows_, num_chunks_;
  std::vector<int64_t> on_host_;
  std::vector<Memory> on_device_;
};

// Copies row_bytes bytes of every chunk's rows, from source_byte of a source row to target_byte of a target row.
ActionPtr copy_rows(const Buffer<"source">& source, Size<"source_byte"> source_byte, const Buffer<"target">& target,
                    Size<"target_byte"> target_byte, Size<"row_bytes"> row_bytes, const ChunkTensors& chunk_tensors) {
  check_row_matrix(source);
  check_row_matrix(target);
  check(source.device() == target.device(), "copy_rows: source is on ", source.device(), ", target on ",
        target.device());
  check(!overlap(source, target), "copy_rows: source and target share memory");
  const int64_t from_bytes = const_rows(source).stride_bytes, to_bytes = const_rows(target).stride_bytes;
  check(source_byte + row_bytes <= from_bytes && target_byte + row_bytes <= to_bytes, "copy_rows: ", row_bytes,
        " bytes at ", source_byte, " and ", target_byte, " do not fit rows of ", from_bytes, " and ", to_bytes,
        " bytes");
  return make_action([from = Memory(source), to = Memory(target), source_byte = source_byte.value,
                      target_byte = target_byte.value, row_bytes = row_bytes.value,
                      chunks = KeptChunks(chunk_tensors, source.size(0), target.size(0), source.device())] {
    run_copy_chunks(chunks.list(), from.tensor(), chunks.num_rows(), row_bytes, const_rows(from.tensor(), source_byte),
                    mutable_rows(to.tensor(), target_byte));
  });
}

// out[r] = sum of parts[p][r], over `width` elements of type `dtype` that start at first_byte of a row.
ActionPtr sum_parts(const std::vector<Buffer<"a part">>& parts, const Buffer<"the sum">& out,
                    Size<"first_byte"> first_byte, Size<"width"> width, ScalarType dtype) {
  const DType type = dtype == ScalarType::Double ? DType::kFloat64 : kernel_dtype(dtype, "the parts");
  check(!parts.empty(), "sum_parts needs at least one part");
  check_row_matrix(out);
  std::vector<Memory> sources;
  for (const Argument& part : parts) {
    check_row_matrix(part);
    check(part.sizes() == out.sizes() && part.device() == out.device() && part.scalar_type() == out.scalar_type(),
          "a part of shape ", part.sizes(), " does not fit the sum's ", out.sizes());
    sources.emplace_back(part);
  }
  const int64_t row_bytes = const_rows(out).stride_bytes, first = first_byte, count = width;
  check(first + bounded_product(count, element_size(type)) <= row_bytes, "sum_parts: ", count, " elements at byte ",
        first, " do not fit rows of ", row_bytes, " bytes");
  return make_action([sources = std::move(sources), to = Memory(out), type, first, count] {
    const Tensor& out = to.tensor();
    if (out.numel() == 0 || count == 0) return;
    std::vector<ConstRows> rows;
    for (const Memory& source : sources) rows.push_back(const_rows(source.tensor(), first));
    const MutableRows target = mutable_rows(out, first);
    const int num_parts = static_cast<int>(rows.size());
    MOE_OPT_IF_CUDA(out, cuda::sum_parts(type, count, rows.data(), num_parts, target, out.size(0), call.stream)) {
      const int64_t bytes = std::max<int64_t>(1, count * element_size(type));
      at::parallel_for(0, out.size(0), std::max<int64_t>(1, kBytesPerTask / bytes), [&](int64_t begin, int64_t end) {
        cpu::sum_parts(type, count, rows.data(), num_parts, target, begin, end);
      });
    }
  });
}

ActionPtr call_python(const py::function& function) {
  return make_action([function] {
    py::gil_scoped_acquire gil;
    try {
      function();
    } catch (py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  });
}

// The action as one that a profiler shows under a name, whichever thread runs it: PyTorch's profiler, or nsys through
// its NVTX ranges.
ActionPtr named(const std::string& name, const ActionPtr& action) {
  struct NamedAction : Action {
    void run() override {
      const at::ThreadLocalStateGuard as_where_it_was_named(state);
      at::RecordFunction range(at::RecordScope::USER_SCOPE);
      range.before(name);
      action->run();
    }
    void join() override { action->join(); }
    void abort() override { action->abort(); }
    std::string name;
    ActionPtr action;
    at::ThreadLocalState state;
  };
  check(action != nullptr, "the action is None");
  auto shown = std::make_shared<NamedAction>();
  shown->name = name;
  shown->action = action;
  return shown;
}

constexpr int64_t kMostLanes = 64;

// (lane, ops it waits for, actions)
using OpTuple = std::tuple<int, std::vector<int>, std::vector<ActionPtr>>;
using FailureTuple = std::tuple<int, int, std::string>;  // op, peer, reason
using SpanTuples = std::vector<std::pair<double, double>>;

template <typename Runner>
std::pair<std::optional<FailureTuple>, SpanTuples> run_ops(const std::shared_ptr<Runner>& runner,
                                                           const std::vector<OpTuple>& tuples, int caller_lane,
                                                           bool record) {
  check(runner != nullptr, "the executor is None");
  std::vector<pipeline::Op> ops;
  ops.reserve(tuples.size());
  for (const auto& [lane, waits_for, actions] : tuples) {
    for (const ActionPtr& action : actions) check(action != nullptr, "an op's action is None");
    ops.push_back({lane, waits_for, actions});
  }
  std::vector<pipeline::Span> spans;
  std::optional<pipeline::Failure> failure;
  {
    py::gil_scoped_release no_gil;
    failure = runner->run(ops, caller_lane, record ? &spans : nullptr);
  }
  std::optional<FailureTuple> failed;
  if (failure) failed = {failure->op, failure->peer, failure->reason};
  SpanTuples times;
  for (const pipeline::Span& span : spans) times.emplace_back(span.start, span.end);
  return {failed, times};
}

py::dict build_info() {
  py::dict info;
  info["version"] = MOE_OPT_VERSION;
  info["abi"] = MOE_OPT_ABI;
  info["torch"] = MOE_OPT_TORCH_VERSION;
  info["compiler"] = MOE_OPT_COMPILER;
#ifdef MOE_OPT_CUDA
  info["backend"] = "cuda";
#else
  info["backend"] = "cpu";
#endif
  info["cuda_archs"] = MOE_OPT_CUDA_ARCHS;
  info["cpu_kernels"] = cpu::kernels().name;
  return info;
}

py::dict host_pool_stats() {
  const HostPoolStats stats = host_pool::stats();
  py::dict out;
  out["used_bytes"] = stats.used_bytes;
  out["cached_bytes"] = stats.cached_bytes;
  out["hits"] = stats.hits;
  out["misses"] = stats.misses;
  return out;
}

}  // namespace
}  // namespace moe_opt

// Binds a function. A call with arguments of other types is refused by a second one that takes all: pybind11's own
// refusal prints the arguments, and PyTorch crashes where it prints a tensor whose memory was freed.
template <typename Scope, typename Function, typename... Extras>
void define(Scope&& scope, const char* name, Function&& function, const Extras&... extras) {
  scope.def(name, std::forward<Function>(function), extras...);
  scope.def(name, [name](const py::args&, const py::kwargs&) -> py::object {
    throw py::type_error(c10::str(name, " takes arguments of other types, or another number of them"));
  });
}

PYBIND11_MODULE(_C, m) {
  using namespace moe_opt;  // NOLINT
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  define(m, "empty", [](const std::vector<Size<"a size">>& shape, ScalarType dtype, at::Device device) {
    return empty(std::vector<int64_t>(shape.begin(), shape.end()), dtype, device);
  });
  define(m, "build_row_map", build_row_map, no_gil);
  define(m, "build_padded_row_map", build_padded_row_map, no_gil);
  define(m, "build_row_map_from_sources", build_row_map_from_sources, no_gil);
  define(m, "permute_rows", permute_rows, no_gil);
  define(m, "permute_packed", permute_packed, no_gil);
  define(m, "unpermute_rows", unpermute_rows, no_gil);
  define(m, "unpermute_rows_backward", unpermute_rows_backward, no_gil);
  define(m, "unpermute_probs", unpermute_probs, no_gil);
  define(m, "copy_chunks", copy_chunks, no_gil);
  define(m, "sr_encode", sr_encode, no_gil);
  define(m, "sr_decode", sr_decode, no_gil);
  define(m, "count_topk", count_topk, no_gil);
  define(m, "count_routing_map", count_routing_map, no_gil);
  define(m, "solve_placement", solve_placement, no_gil);
  define(m, "place_samples", place_samples, no_gil);
  define(m, "plan_exchange", plan_exchange);
  // By their holders: an object that Python made without calling its class has none, and is refused.
  const auto run_action = [](const ActionPtr& action) {
    check(action != nullptr, "the action is None");
    action->run();
  };
  py::class_<Action, ActionPtr> action(m, "Action");
  define(action, "run", run_action, no_gil);
  define(m, "exchange", exchange);
  define(m, "copy_rows", copy_rows);
  define(m, "sum_parts", sum_parts);
  define(m, "abort_work", abort_work, no_gil);
  define(m, "call_python", call_python);
  define(m, "named", named);
  py::class_<pipeline::Executor, std::shared_ptr<pipeline::Executor>> executor(m, "Executor");
  executor.def(py::init([](Size<"the number of lanes"> lanes) {
    check(lanes <= kMostLanes, lanes, " lanes: at most ", kMostLanes);
    return std::make_shared<pipeline::Executor>(static_cast<int>(lanes));
  }));
  define(executor, "run", run_ops<pipeline::Executor>);
  const auto give_up = [](const std::shared_ptr<pipeline::Executor>& executor) {
    check(executor != nullptr, "the executor is None");
    executor->give_up();
  };
  define(executor, "give_up", give_up, no_gil);
#ifdef MOE_OPT_CUDA
  py::class_<pipeline::StreamExecutor, std::shared_ptr<pipeline::StreamExecutor>>(m, "StreamExecutor")
      .def(py::init([](const std::vector<int>& priorities) {
        return std::make_shared<pipeline::StreamExecutor>(pipeline::cuda_streams(priorities));
      }))
      .def("run", run_ops<pipeline::StreamExecutor>);
  define(m, "new_cuda_stream",
         [](int priority) { return reinterpret_cast<intptr_t>(pipeline::new_cuda_stream(priority)); });
#endif
  define(m, "build_info", build_info);
  define(m, "select_cpu_kernels", [](const std::string& name) { return cpu::select_kernels(name.c_str()); });
  define(m, "keep_uncaught_exceptions", keep_uncaught_exceptions);
  define(m, "uncaught_exception", uncaught_exception);
  define(m, "host_pool_stats", host_pool_stats);
  define(m, "host_pool_trim", host_pool::trim, no_gil);
  define(m, "host_pool_set_limit", [](Size<"the limit"> bytes) { host_pool::set_limit(bytes); }, no_gil);
}
