#include "kernels/residual_codec.h"

#include <atomic>
#include <tuple>

#include "bindings/module.h"
#include "bindings/tensors.h"

namespace moe_opt {
namespace {

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
    Tensor scratch = empty_like({cuda::sr_encode_scratch_bytes(dtype, numel, k)}, ScalarType::Byte, expert);
    cuda::sr_encode(dtype, numel, expert_data, shared_data, k, values.mutable_data_ptr(), indices_data,
                    scratch.mutable_data_ptr(), call.stream);
  }) {
    cpu::sr_encode(dtype, numel, expert_data, shared_data, k, values.mutable_data_ptr(), indices_data,
                   at::get_num_threads(), for_each_on_threads);
  }
  return {values, indices};
}

// Adds the residuals to the shared expert, in place.
void sr_decode(const Input<"values">& values, const Input<"indices">& indices, const Buffer<"expert">& expert) {
  check_expert(expert, expert);
  const at::Device device = expert.device();
  const int64_t numel = expert.numel(), k = values.numel();
  check_tensor(values, 1, device);
  check_tensor(indices, 1, device);
  check(values.scalar_type() == expert.scalar_type(), "values are ", values.scalar_type(), ", but expert is ",
        expert.scalar_type());
  check(indices.scalar_type() == ScalarType::UInt16, "indices must be uint16, but are ", indices.scalar_type());
  check(k <= numel && indices.numel() == codec_index_words(numel, k), values.numel(), " values with ", indices.numel(),
        " indices do not belong to an expert of shape ", expert.sizes());
  check(!overlap(expert, values) && !overlap(expert, indices), "expert shares memory with values or indices");
  const DType dtype = kernel_dtype(expert);
  expert.unsafeGetTensorImpl()->bump_version();  // so that autograd sees that it was written
  void* expert_data = expert.mutable_data_ptr();
  const void* values_data = values.const_data_ptr();
  const uint16_t* indices_data = indices.const_data_ptr<uint16_t>();
  MOE_OPT_IF_CUDA(expert, cuda::sr_decode(dtype, numel, values_data, indices_data, k, expert_data, call.stream)) {
    std::atomic<bool> ok{cpu::codec_ends_valid(numel, indices_data, k)};
    if (ok) {
      at::parallel_for(0, codec_blocks(numel), 1, [&](int64_t begin, int64_t end) {
        if (!cpu::sr_decode(dtype, numel, values_data, indices_data, expert_data, begin, end)) ok = false;
      });
    }
    check(ok, "indices are not what sr_encode writes for an expert of shape ", expert.sizes());
  }
}

}  // namespace

void bind_residual_codec(py::module_& m) {
  define(m, "sr_encode", sr_encode, NoGil());
  define(m, "sr_decode", sr_decode, NoGil());
}

}  // namespace moe_opt
