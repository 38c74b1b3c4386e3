// PyTorch's CUDA streams, as far as csrc uses them, on the emulator: a number each.
#pragma once

#include <c10/core/Stream.h>
#include <cuda_runtime_api.h>

namespace c10::cuda {

class CUDAStream {
 public:
  explicit CUDAStream(StreamId id) : id_(id) {}
  cudaStream_t stream() const { return reinterpret_cast<cudaStream_t>(id_); }
  operator cudaStream_t() const { return stream(); }
  StreamId id() const { return id_; }

 private:
  StreamId id_;
};

CUDAStream getCurrentCUDAStream(DeviceIndex device = -1);
CUDAStream getStreamFromPool(int priority, DeviceIndex device = -1);
void setCurrentCUDAStream(CUDAStream stream);

}  // namespace c10::cuda
