// PyTorch's CUDA streams, as far as csrc uses them, on the emulator: a number each.
#pragma once

#include <c10/core/Stream.h>
#include <cuda_runtime_api.h>

namespace c10::cuda {

class CUDAStream {
 public:
  enum Unchecked { UNCHECKED };
  CUDAStream(Unchecked, Stream stream) : id_(stream.id()) {}
  cudaStream_t stream() const { return reinterpret_cast<cudaStream_t>(id_); }
  operator cudaStream_t() const { return stream(); }
  StreamId id() const { return id_; }

 private:
  StreamId id_;
};

inline CUDAStream numbered(StreamId id) {
  return CUDAStream(CUDAStream::UNCHECKED, Stream(Stream::UNSAFE, Device(DeviceType::CUDA, 0), id));
}
CUDAStream getCurrentCUDAStream(DeviceIndex device = -1);
void setCurrentCUDAStream(CUDAStream stream);
inline CUDAStream getStreamFromExternal(cudaStream_t stream, DeviceIndex) {
  return numbered(reinterpret_cast<StreamId>(stream));
}

}  // namespace c10::cuda
