// Tensors of the emulated device, for code that works on their memory itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace emulator {

// A tensor of the CPU over the memory of one of the device; others are returned as they are.
at::Tensor on_host(const at::Tensor& tensor);

void mark_written(const at::Tensor& tensor);
void mark_unwritten(const at::Tensor& tensor);
// Whether nobody has written any of its bytes since.
bool is_unwritten(const at::Tensor& tensor);
// Throws where it holds bytes that nobody has written; `what` reads it.
void check_readable(const at::Tensor& tensor, const std::string& what);

}  // namespace emulator
