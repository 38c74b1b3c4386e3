// float16 as CUDA has it, as far as csrc uses it.
#pragma once

#include "cuda_runtime.h"

struct __half {
  unsigned short bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline __half __float2half_rn(float value) {
  if (value != value) return {0x7fff};
  return {::emulator::bits_as<unsigned short>(static_cast<_Float16>(value))};
}
inline float __half2float(__half value) { return static_cast<float>(::emulator::bits_as<_Float16>(value.bits)); }
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
