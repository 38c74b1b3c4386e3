// PyTorch's guards of the current CUDA device and stream, as far as csrc uses them, on the emulator.
#pragma once

#include <c10/core/Device.h>

#include "CUDAStream.h"

namespace c10::cuda {

struct CUDAGuard {
  explicit CUDAGuard(Device) {}  // there is one device
  explicit CUDAGuard(DeviceIndex) {}
};

class CUDAStreamGuard {
 public:
  explicit CUDAStreamGuard(CUDAStream stream) : before_(getCurrentCUDAStream()) { setCurrentCUDAStream(stream); }
  ~CUDAStreamGuard() { setCurrentCUDAStream(before_); }
  CUDAStreamGuard(const CUDAStreamGuard&) = delete;

 private:
  CUDAStream before_;
};

}  // namespace c10::cuda
