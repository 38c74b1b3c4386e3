#include "bindings/arguments.h"

#include <optional>

namespace moe_opt {
namespace {

using at::Tensor;

// Bytes that a tensor needs of its storage; nothing where that is no number.
std::optional<int64_t> reach(const Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  bool fits = last >= 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    int64_t step = 0;
    fits &= tensor.stride(d) >= 0 && !__builtin_mul_overflow(tensor.size(d) - 1, tensor.stride(d), &step) &&
            !__builtin_add_overflow(last, step, &last);
  }
  int64_t bytes = 0;
  fits &= !__builtin_add_overflow(last, 1, &last) && !__builtin_mul_overflow(last, tensor.element_size(), &bytes);
  return fits ? std::optional(bytes) : std::nullopt;
}

bool in_memory(const Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  const std::optional<int64_t> bytes = reach(tensor);
  return bytes && static_cast<uint64_t>(*bytes) <= tensor.storage().nbytes() && tensor.const_data_ptr() != nullptr;
}

void check_in_memory(const Tensor& tensor, const char* name) {
  check(in_memory(tensor), name, " of shape ", tensor.sizes(), " has no memory (any more): its storage holds ",
        tensor.storage().nbytes(), " bytes");
}

// Tensors that stand for others, or whose elements do not lie in memory as its shape and strides say.
constexpr c10::DispatchKeySet kNotPlain({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                         c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::ZeroTensor});

void check_plain(const Tensor& tensor, const char* name) {
  const c10::DispatchKeySet keys = tensor.key_set();
  const bool plain = !keys.has_any(kNotPlain) && tensor.has_storage() && !tensor.is_nested() &&
                     !tensor.is_quantized() && tensor.layout() == at::kStrided &&
                     !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  check(plain, name,
        " is no plain tensor over its own memory, but a sparse, nested, quantized, fake or traced one, or of a class "
        "that wraps another: pass the dense tensor that it stands for");
  const at::Device device = tensor.device();
#ifdef MOE_OPT_CUDA
  check(device.is_cpu() || device.is_cuda(), name, " is on ", device, ": only CPU and CUDA are supported");
#else
  check(device.type() != at::kMeta, name, " is on meta, where nothing has values: pass it on the CPU");
  check(device.is_cpu(), name, " is on ", device,
        ", but this extension was built for CPU only: rebuild it where nvcc and a CUDA-enabled PyTorch are installed");
#endif
  checked_bytes(tensor.sizes(), tensor.element_size(), name);
  check_in_memory(tensor, name);
  const int64_t alignment = std::min<int64_t>(tensor.element_size(), alignof(int64_t));
  check(tensor.numel() == 0 || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % alignment == 0, name,
        " begins at an address that is no multiple of its elements' ", tensor.element_size(), " bytes: pass ", name,
        ".clone()");
}

}  // namespace

int64_t bounded_product(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? kMostBytes + 1 : std::min(product, kMostBytes + 1);
}

int64_t checked_bytes(at::IntArrayRef shape, int64_t element_size, const char* name) {
  int64_t bytes = element_size, most = element_size;
  for (const int64_t extent : shape) {
    check(extent >= 0, name, ": negative size in shape ", shape);
    bytes = bounded_product(bytes, extent);
    most = bounded_product(most, std::max<int64_t>(1, extent));
  }
  check(most <= kMostBytes, name, ": no machine holds the shape ", shape, " of elements of ", element_size, " bytes");
  return bytes;
}

Argument checked_buffer(const Tensor& tensor, const char* name) {
  check_plain(tensor, name);
  check(!tensor.is_neg() && !tensor.is_conj(), name, " is a lazily negated or conjugated view: pass ", name,
        tensor.is_neg() ? ".resolve_neg()" : ".resolve_conj()");
  return {tensor, name};
}

Argument checked_input(const Tensor& tensor, const char* name) {
  check_plain(tensor, name);
  return {tensor.resolve_conj().resolve_neg(), name};
}

int64_t checked_size(PyObject* index, const char* name) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index, &overflow);
  check(overflow == 0 && value <= kMostBytes, name, " is ", overflow < 0 ? "far below zero" : "above 2^56");
  check(value >= 0, name, " is negative: ", value);
  return value;
}

void Memory::check_held() const { check_in_memory(tensor_, name_); }

}  // namespace moe_opt
