#include "bindings/tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "kernels/host_pool.h"

namespace moe_opt {

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

ConstRows const_rows(const Tensor& rows, int64_t first_byte) {
  const int64_t stride_bytes = (rows.dim() == 2 ? rows.size(1) : 1) * rows.element_size();
  return {static_cast<const uint8_t*>(rows.const_data_ptr()) + first_byte, stride_bytes};
}

MutableRows mutable_rows(const Tensor& rows, int64_t first_byte) {
  return {static_cast<uint8_t*>(rows.mutable_data_ptr()) + first_byte, const_rows(rows).stride_bytes};
}

bool overlap(const Tensor& a, const Tensor& b) {
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
  return begin(a) < begin(b) + b.nbytes() && begin(b) < begin(a) + a.nbytes();
}

const cpu::ForEach for_each_on_threads = [](int64_t count, const std::function<void(int64_t)>& body) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
};

}  // namespace moe_opt
