// What the CUDA kernels share: launch checks, streaming vector access, a block-wide sum.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace moe_opt {
namespace cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kBlockThreads = 256;  // upper bound of the block sizes below, except where a kernel names its own
constexpr int kVectorBytes = 16;    // widest load and store of a thread

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("megatron_moe_opt: CUDA ") + what +
                             " failed: " + cudaGetErrorString(error));
  }
}

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A checked grid dimension: the x dimension of a grid holds at most 2^31 - 1 blocks.
inline unsigned grid_blocks(int64_t blocks, const char* what) {
  if (blocks > INT32_MAX) {
    throw std::runtime_error(std::string("megatron_moe_opt: ") + what + " needs " + std::to_string(blocks) +
                             " CUDA blocks, more than a grid can hold; split the tokens");
  }
  return static_cast<unsigned>(blocks);
}

// Threads of a block that walks `items` with `per_thread` of them in each thread's registers: as few steps as
// kBlockThreads allows, and no more warps than these steps need (896 vectors, 4 a thread: 7 warps, none idle).
inline int row_threads(int64_t items, int per_thread) {
  const int64_t steps = std::max<int64_t>(1, divide_up(items, int64_t{kBlockThreads} * per_thread));
  const int64_t threads = divide_up(items, steps * per_thread);
  return static_cast<int>(std::max<int64_t>(1, divide_up(threads, kWarp)) * kWarp);
}

// Whether every row that starts at data + r * stride_bytes can be read in units of `bytes` (a power of two).
inline bool rows_aligned(const void* data, int64_t stride_bytes, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0 && stride_bytes % bytes == 0;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

// The unsigned integer that moves kBytes bytes in one access.
template <int kBytes>
struct UnitOf;
template <>
struct UnitOf<16> {
  using type = uint4;
};
template <>
struct UnitOf<8> {
  using type = uint2;
};
template <>
struct UnitOf<4> {
  using type = unsigned int;
};
template <>
struct UnitOf<2> {
  using type = unsigned short;
};
template <>
struct UnitOf<1> {
  using type = unsigned char;
};

// kCount consecutive elements, moved by one access. All large matrices are read once and written once, so accesses
// are marked evict-first (.cs): the maps, which several warps read, stay in the caches.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  using Unit = typename UnitOf<sizeof(T) * kCount>::type;
  T at[kCount];

  __device__ __forceinline__ static Vector load(const char* row, int64_t index) {
    const Unit unit = __ldcs(reinterpret_cast<const Unit*>(row) + index);
    Vector vector;
    memcpy(&vector, &unit, sizeof(unit));
    return vector;
  }
  __device__ __forceinline__ void store(char* row, int64_t index) const {
    Unit unit;
    memcpy(&unit, this, sizeof(unit));
    __stcs(reinterpret_cast<Unit*>(row) + index, unit);
  }
};

// Sum over the threads of a block (a multiple of 32 threads, at most 1024), in thread order; every thread calls it.
struct BlockSum {
  int64_t inclusive;  // up to and with this thread
  int64_t total;
};
__device__ __forceinline__ BlockSum block_sum(int64_t value) {
  __shared__ int64_t warp_totals[kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int64_t below = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += below;
  }
  __syncthreads();  // an earlier call may still be read
  if (lane == kWarp - 1) warp_totals[warp] = value;
  __syncthreads();
  BlockSum sum{value, 0};
  for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) {
    if (w < warp) sum.inclusive += warp_totals[w];
    sum.total += warp_totals[w];
  }
  return sum;
}

}  // namespace cuda
}  // namespace moe_opt
