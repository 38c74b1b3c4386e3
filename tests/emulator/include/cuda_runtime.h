// CUDA C++ and its runtime, as far as csrc uses them, on the emulator.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../emulator.h"
#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::emulator::thread_index())
#define blockIdx (::emulator::block_index())
#define blockDim (::emulator::block_dim())
#define gridDim (::emulator::grid_dim())

using dim3 = ::emulator::Dim3;
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(8) float2 {
  float x, y;
};

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return static_cast<std::common_type_t<A, B>>(b) < static_cast<std::common_type_t<A, B>>(a) ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return static_cast<std::common_type_t<A, B>>(a) < static_cast<std::common_type_t<A, B>>(b) ? b : a;
}

namespace emulator {

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
template <typename T>
uint64_t as_word(T value) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  return word;
}
template <typename T>
T of_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}
template <typename T>
__attribute__((noinline, no_sanitize("thread"))) T load(const T* place) {
  access(place, sizeof(T), Access::kRead, __builtin_return_address(0));
  return *place;
}
template <typename T>
__attribute__((noinline, no_sanitize("thread"))) void store(T* place, T value) {
  access(place, sizeof(T), Access::kWrite, __builtin_return_address(0));
  *place = value;
}
template <typename T>
__attribute__((noinline, no_sanitize("thread"))) T atomic_add(T* place, T value) {
  access(place, sizeof(T), Access::kAtomic, __builtin_return_address(0));
  const T before = *place;
  *place = before + value;
  return before;
}
inline unsigned lane() {
  const Dim3 index = thread_index(), size = block_dim();
  return (index.x + size.x * (index.y + size.y * index.z)) % 32;
}
template <typename T>
__attribute__((no_sanitize("thread"))) T shuffle(int line, unsigned mask, T value, unsigned from) {
  return of_word<T>(collective(line, mask, as_word(value))[from]);
}
template <typename T>
__attribute__((no_sanitize("thread"))) T reduce_add(int line, unsigned mask, T value) {
  const uint64_t* values = collective(line, mask, as_word(value));
  T sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += mask >> lane & 1 ? of_word<T>(values[lane]) : 0;
  return sum;
}
__attribute__((no_sanitize("thread"))) inline unsigned ballot(int line, unsigned mask, bool yes) {
  const uint64_t* values = collective(line, mask, yes);
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= (mask >> lane & 1 && values[lane] != 0 ? 1u : 0u) << lane;
  return all;
}

}  // namespace emulator

#define __syncthreads() ::emulator::barrier(__LINE__)
#define __ballot_sync(mask, yes) ::emulator::ballot(__LINE__, mask, yes)
#define __reduce_add_sync(mask, value) ::emulator::reduce_add(__LINE__, mask, value)
#define __shfl_up_sync(mask, value, distance) \
  ::emulator::shuffle(__LINE__, mask, value,  \
                      ::emulator::lane() >= unsigned(distance) ? ::emulator::lane() - (distance) : ::emulator::lane())
#define __shfl_xor_sync(mask, value, bits) ::emulator::shuffle(__LINE__, mask, value, ::emulator::lane() ^ (bits))

template <typename T>
T __ldcs(const T* place) {
  return ::emulator::load(place);
}
template <typename T>
void __stcs(T* place, T value) {
  ::emulator::store(place, value);
}
template <typename T>
T atomicAdd(T* place, T value) {
  return ::emulator::atomic_add(place, value);
}

inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline unsigned int __float_as_uint(float value) { return ::emulator::bits_as<unsigned int>(value); }
inline float __uint_as_float(unsigned int bits) { return ::emulator::bits_as<float>(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
using std::fmaf;
