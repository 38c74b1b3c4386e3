#pragma once

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#define C10_CUDA_CHECK(call) TORCH_CHECK((call) == cudaSuccess, #call)
#define C10_CUDA_CHECK_WARN(call) (void)(call)
