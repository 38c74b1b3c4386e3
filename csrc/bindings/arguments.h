// The one way in for what Python passes: every bound function takes its tensors and sizes as one of these types, whose
// conversion from Python refuses what a kernel could not take, in one sentence that names the argument. What has come
// through is a plain tensor over memory that it holds, or a size whose sums and small multiples fit an int64.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

namespace moe_opt {

// More than any machine addresses. Sizes are no larger, nor are the bytes of any tensor, counted as if no dimension
// were empty: the products and sums that kernels take of these stay inside an int64.
constexpr int64_t kMostBytes = int64_t{1} << 56;

template <typename... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) throw std::invalid_argument(c10::str(parts...));  // a ValueError in Python
}

// a * b for a, b >= 0, or kMostBytes + 1 where that is less.
int64_t bounded_product(int64_t a, int64_t b);

// The bytes of a tensor of this shape, which must be one that a machine can hold.
int64_t checked_bytes(at::IntArrayRef shape, int64_t element_size, const char* name);

// A tensor and what the function's documentation calls it.
struct Argument : at::Tensor {
  const char* name = "";
};

// As it is passed: plain, dense, on a device that this extension was built for, over memory that is there.
Argument checked_buffer(const at::Tensor& tensor, const char* name);
// The same; a lazy negation or conjugation, which a kernel would not see, is carried out.
Argument checked_input(const at::Tensor& tensor, const char* name);

int64_t checked_size(PyObject* index, const char* name);

template <size_t kSize>
struct Name {
  char text[kSize];
  constexpr Name(const char (&name)[kSize]) { std::copy_n(name, kSize, text); }  // NOLINT: from a string literal
};

// What a function reads while it is called.
template <Name kName>
struct Input : Argument {};
// What is written, or read by an action some time later: memory in which a lazy negation cannot be carried out.
template <Name kName>
struct Buffer : Argument {};
// 0 <= value <= kMostBytes.
template <Name kName>
struct Size {
  int64_t value = 0;
  operator int64_t() const { return value; }  // NOLINT: it is one
};

// The memory of an argument for as long as an action needs it. Python may change what the tensor it passed refers to
// before the action runs, and free the memory even so: every access looks whether it is still there.
class Memory {
 public:
  explicit Memory(const Argument& argument) : tensor_(argument.variable_data()), name_(argument.name) {}

  const at::Tensor& tensor() const {
    check_held();
    return tensor_;
  }
  const void* data() const { return tensor().const_data_ptr(); }

 private:
  void check_held() const;

  at::Tensor tensor_;  // a tensor of its own over the same memory
  const char* name_;
};

}  // namespace moe_opt

namespace pybind11::detail {

// Of Input or Buffer, as `kChecked` takes it.
template <typename Checked, auto kChecked, moe_opt::Name kName>
struct tensor_caster {
  PYBIND11_TYPE_CASTER(Checked, const_name("torch.Tensor"));
  bool load(handle source, bool convert) {
    type_caster<at::Tensor> tensor;
    if (!tensor.load(source, convert)) return false;
    value = {kChecked(static_cast<at::Tensor&>(tensor), kName.text)};
    return true;
  }
};
template <moe_opt::Name kName>
struct type_caster<moe_opt::Input<kName>> : tensor_caster<moe_opt::Input<kName>, moe_opt::checked_input, kName> {};
template <moe_opt::Name kName>
struct type_caster<moe_opt::Buffer<kName>> : tensor_caster<moe_opt::Buffer<kName>, moe_opt::checked_buffer, kName> {};

template <moe_opt::Name kName>
struct type_caster<moe_opt::Size<kName>> {
  PYBIND11_TYPE_CASTER(moe_opt::Size<kName>, const_name("int"));
  bool load(handle source, bool) {
    const auto index = reinterpret_steal<object>(PyNumber_Index(source.ptr()));
    if (!index) {
      PyErr_Clear();
      return false;
    }
    value.value = moe_opt::checked_size(index.ptr(), kName.text);
    return true;
  }
};

}  // namespace pybind11::detail
