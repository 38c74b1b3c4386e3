// Tensors as kernels take them: pointers, row views, the checks that several functions share, and what runs where.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#ifdef MOE_OPT_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "bindings/arguments.h"
#include "kernels/for_each.h"
#include "kernels/types.h"

namespace moe_opt {

using at::ScalarType;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
template <Name kName>
using OptionalInput = std::optional<Input<kName>>;

// On the CPU from the host pool.
Tensor empty(at::IntArrayRef shape, ScalarType dtype, at::Device device);
Tensor empty_like(at::IntArrayRef shape, ScalarType dtype, const Tensor& like);

DType kernel_dtype(ScalarType dtype, const char* name);
DType kernel_dtype(const Argument& tensor);
int64_t prob_size(ScalarType dtype);

void check_contiguous(const Argument& tensor);
void check_tensor(const Argument& tensor, int64_t dim, const at::Device& device);
void check_index(const Argument& tensor, const at::Device& device);

// The rows of a contiguous tensor of one or two dimensions, from a byte of each on.
ConstRows const_rows(const Tensor& rows, int64_t first_byte = 0);
MutableRows mutable_rows(const Tensor& rows, int64_t first_byte = 0);
bool overlap(const Tensor& a, const Tensor& b);

// Calls body(begin, end) for ranges of rows, on several threads where so many of row_bytes are worth it.
template <typename F>
void for_row_ranges(int64_t num_rows, int64_t row_bytes, const F& body) {
  constexpr int64_t kBytesPerTask = 64 * 1024;  // least work worth a thread
  at::parallel_for(0, num_rows, std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, row_bytes)), body);
}

// PyTorch's threads, for the kernels that cut their work themselves.
extern const cpu::ForEach for_each_on_threads;

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

}  // namespace moe_opt
