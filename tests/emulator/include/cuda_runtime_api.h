// The calls of the CUDA runtime that csrc uses, on the emulator. Work is done when the call that issues it returns, so
// streams and events have nothing to wait for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>

#include "../counting.h"
#include "../emulator.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = struct emulated_stream*;
using cudaEvent_t = struct emulated_event*;
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
constexpr unsigned cudaEventDefault = 0, cudaEventDisableTiming = 2, cudaStreamNonBlocking = 1;

inline cudaError_t cudaGetLastError() { return static_cast<cudaError_t>(emulator::fetch_error()); }
inline cudaError_t cudaPeekAtLastError() { return static_cast<cudaError_t>(emulator::peek_error()); }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess             ? "no error"
         : error == cudaErrorInvalidValue ? "invalid argument"
                                          : "invalid configuration";
}
inline cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t = nullptr) {
  if (!emulator::is_device(data)) {
    emulator::set_error(cudaErrorInvalidValue);
    return cudaErrorInvalidValue;
  }
  std::memset(data, value, bytes);
  emulator::host_writes(data, bytes);
  emulator::counting::memset(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulator::multiprocessors;
  return cudaSuccess;
}
template <typename Function>
cudaError_t cudaFuncSetAttribute(Function* function, cudaFuncAttribute, int value) {
  if (value > 227 * 1024) {  // of an H100
    emulator::set_error(cudaErrorInvalidValue);
    return cudaErrorInvalidValue;
  }
  emulator::allow_shared(reinterpret_cast<const void*>(function), static_cast<size_t>(value));
  return cudaSuccess;
}

// Every stream has a clock, which goes on with each event and is put forward by what the stream waits for.
inline uint64_t& emulated_time(cudaStream_t stream) {
  static std::map<cudaStream_t, uint64_t> times;
  return times[stream];
}
struct emulated_event {
  uint64_t recorded;
};
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new emulated_event{0};
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->recorded = ++emulated_time(stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  emulated_time(stream) = std::max(emulated_time(stream), event->recorded);
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = static_cast<float>(end->recorded - begin->recorded);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  static uintptr_t streams = 0;
  *stream = reinterpret_cast<cudaStream_t>(++streams);  // a name
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
