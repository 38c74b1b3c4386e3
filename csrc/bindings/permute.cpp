#include "kernels/permute.h"

#include "bindings/module.h"
#include "bindings/row_map.h"
#include "bindings/wire_format.h"

namespace moe_opt {
namespace {

constexpr int64_t kLaneBytes = 16;  // of a packed row, behind its elements; holds the probability

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

void run_permute(const RowMap& map, const Tensor& tokens, DType dtype, DType wire, int64_t hidden,
                 const Tensor& permuted, const Argument* probs, MutableRows permuted_probs, int64_t lane_bytes) {
  const void* probs_data = probs ? probs->const_data_ptr() : nullptr;
  const int64_t size = probs ? probs->element_size() : 0;
  MOE_OPT_IF_CUDA(tokens, cuda::permute_rows(map, dtype, wire, hidden, const_rows(tokens), mutable_rows(permuted),
                                             probs_data, size, permuted_probs, lane_bytes, call.stream)) {
    for_token_ranges(map, hidden * element_size(dtype), [&](int64_t begin, int64_t end) {
      cpu::permute_rows(map, dtype, wire, hidden, const_rows(tokens), mutable_rows(permuted), probs_data, size,
                        permuted_probs, lane_bytes, begin, end);
    });
  }
}

// permuted [R, H] and, with probs, permuted probs [R].
std::tuple<Tensor, OptionalTensor> permute_rows(const RowMapTensors& row_map, const Input<"tokens">& tokens,
                                                const OptionalInput<"probs">& probs) {
  const RowMap map = view(row_map, tokens.device());
  check_rows(tokens, map.num_tokens, tokens.device());
  const DType dtype = kernel_dtype(tokens);
  Tensor permuted = empty_like({map.num_rows, tokens.size(1)}, tokens.scalar_type(), tokens);
  OptionalTensor permuted_probs;
  MutableRows lanes{nullptr, 0};
  if (probs) {
    check_probs(*probs, map, tokens.device());
    prob_size(probs->scalar_type());
    permuted_probs = empty_like({map.num_rows}, probs->scalar_type(), tokens);
    lanes = mutable_rows(*permuted_probs);
  }
  run_permute(map, tokens, dtype, dtype, tokens.size(1), permuted, probs ? &*probs : nullptr, lanes,
              probs ? probs->element_size() : 0);
  return {permuted, permuted_probs};
}

// out [R, V] from rows [T, >= V]: each row in all of its places, whatever its elements are, two bytes at a time or
// more. out may have more rows than the map.
void spread_rows(const RowMapTensors& row_map, const Input<"rows">& rows, const Buffer<"out">& out) {
  const at::Device device = rows.device();
  check_tensor(rows, 2, device);
  check_tensor(out, 2, device);
  const RowMap map = view(row_map, device, out.size(0));
  check(rows.size(0) == map.num_tokens, "spread_rows: ", rows.size(0), " rows, but the row map has ", map.num_tokens,
        " tokens");
  const int64_t row_bytes = out.size(1) * out.element_size();
  check(out.scalar_type() == rows.scalar_type() && out.size(1) <= rows.size(1), "spread_rows: out of shape ",
        out.sizes(), " and dtype ", out.scalar_type(), " cannot hold the beginnings of ", "rows of shape ",
        rows.sizes(), " and dtype ", rows.scalar_type());
  const auto is_even = [](const Tensor& tensor) {
    return tensor.size(1) * tensor.element_size() % 2 == 0 &&
           reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 2 == 0;
  };
  check(is_even(rows) && is_even(out), "spread_rows: rows of shape ", rows.sizes(), " and out of shape ", out.sizes(),
        " must begin at even addresses");
  check(!overlap(rows, out), "spread_rows: rows and out share memory");
  constexpr DType kTwoBytes = DType::kFloat16;
  run_permute(map, rows, kTwoBytes, kTwoBytes, row_bytes / 2, out, nullptr, {}, 0);
}

// packed [R, payload + lane], of the dtype of rows on the wire.
Tensor permute_packed(const RowMapTensors& row_map, const Input<"tokens">& tokens, const Input<"probs">& probs,
                      const std::string& wire) {
  const RowMap map = view(row_map, tokens.device());
  check_rows(tokens, map.num_tokens, tokens.device());
  check_probs(probs, map, tokens.device());
  prob_size(probs.scalar_type());
  const ScalarType dtype = wire_dtype(tokens.scalar_type(), wire);
  const DType format = wire_format(dtype, wire, "tokens");
  const int64_t first_lane = payload_bytes(format, tokens.size(1));
  const int64_t element = static_cast<int64_t>(c10::elementSize(dtype));
  Tensor packed = empty_like({map.num_rows, (first_lane + kLaneBytes) / element}, dtype, tokens);
  run_permute(map, tokens, kernel_dtype(tokens), format, tokens.size(1), packed, &probs,
              mutable_rows(packed, first_lane), kLaneBytes);
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

// out [T, >= payload]: the sums of rows [R, >= payload], each of a format; or of those of a map among more of them.
void sum_rows(const RowMapTensors& row_map, const Input<"rows">& rows, Size<"hidden"> hidden, const std::string& wire,
              const std::string& out_wire, const Buffer<"out">& out) {
  const at::Device device = rows.device();
  const DType from = check_wire_rows(rows, wire, hidden, std::nullopt, device);
  const RowMap map = view(row_map, device, rows.size(0));
  const DType to = check_wire_rows(out, out_wire, hidden, map.num_tokens, device);
  check(sums(from, to) || (from == to && !has_scales(from)), "sum_rows: no sums of rows in ", wire, " (",
        rows.scalar_type(), ") as rows in ", out_wire, " (", out.scalar_type(), ")");
  check(!overlap(rows, out), "sum_rows: rows and out share memory");
  MOE_OPT_IF_CUDA(rows, cuda::sum_rows(map, from, to, hidden, const_rows(rows), mutable_rows(out), call.stream)) {
    for_token_ranges(map, payload_bytes(from, hidden), [&](int64_t begin, int64_t end) {
      cpu::sum_rows(map, from, to, hidden, const_rows(rows), mutable_rows(out), begin, end);
    });
  }
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

}  // namespace

void bind_permute(py::module_& m) {
  define(m, "permute_rows", permute_rows, NoGil());
  define(m, "spread_rows", spread_rows, NoGil());
  define(m, "permute_packed", permute_packed, NoGil());
  define(m, "unpermute_rows", unpermute_rows, NoGil());
  define(m, "sum_rows", sum_rows, NoGil());
  define(m, "unpermute_rows_backward", unpermute_rows_backward, NoGil());
  define(m, "unpermute_probs", unpermute_probs, NoGil());
}

}  // namespace moe_opt
