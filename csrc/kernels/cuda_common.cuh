// What the CUDA kernels share: launch checks, streaming vector access, a block-wide sum.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "types.h"

namespace moe_opt {
namespace cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kBlockThreads = 256;  // upper bound of the block sizes below, except where a kernel names its own
constexpr int kVectorBytes = 16;    // widest load and store of a thread
constexpr int kBlockWarps = kBlockThreads / kWarp;

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // else it stays, and the next launch, which may be all right, is blamed for it
    throw std::runtime_error(std::string("megatron_moe_opt: CUDA ") + what + " failed: " + cudaGetErrorString(error));
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

// Of the current device: as many blocks, and none of it is idle.
inline int64_t multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "number of multiprocessors");
  return count;
}

// Threads of a block that walks `items` with `per_thread` of them in each thread's registers: as few steps as
// kBlockThreads allows, and no more warps than these steps need (896 vectors, 4 a thread: 7 warps, none idle).
inline int row_threads(int64_t items, int per_thread) {
  const int64_t steps = std::max<int64_t>(1, divide_up(items, int64_t{kBlockThreads} * per_thread));
  const int64_t threads = divide_up(items, steps * per_thread);
  return static_cast<int>(std::max<int64_t>(1, divide_up(threads, kWarp)) * kWarp);
}

// Whether every row can be read in units of `bytes` (a power of two).
template <typename... Rows>
bool rows_aligned(int64_t bytes, const Rows&... rows) {
  return ((reinterpret_cast<uintptr_t>(rows.data) % bytes == 0 && rows.stride_bytes % bytes == 0) && ...);
}

// The unsigned integer that moves kBytes bytes in one access.
template <int kBytes>
struct UnitOf;
template <>
struct UnitOf<16> {
  using type = uint4;
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

// Calls launch(unit) with the first of the units, of so many bytes each, for which fits(bytes), or with the last one.
template <int kBytes, int... kNarrower, typename Fits, typename Launch>
void with_unit(const Fits& fits, const Launch& launch) {
  if constexpr (sizeof...(kNarrower) > 0) {
    if (!fits(kBytes)) return with_unit<kNarrower...>(fits, launch);
  }
  launch(typename UnitOf<kBytes>::type{});
}

// float32 from and to the elements of a 32-bit word, or a single element. Rounds to nearest even.
__device__ __forceinline__ void unpack(unsigned int word, float, float* out) { out[0] = __uint_as_float(word); }
__device__ __forceinline__ void unpack(unsigned int word, __nv_bfloat16, float* out) {
  out[0] = __uint_as_float(word << 16);
  out[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unpack(unsigned int word, __half, float* out) {
  const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
  out[0] = pair.x;
  out[1] = pair.y;
}
__device__ __forceinline__ unsigned int pack(const float* in, float) { return __float_as_uint(in[0]); }
__device__ __forceinline__ unsigned int pack(const float* in, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(in[0], in[1]);
  return reinterpret_cast<const unsigned int&>(pair);
}
__device__ __forceinline__ unsigned int pack(const float* in, __half) {
  const __half2 pair = __floats2half2_rn(in[0], in[1]);
  return reinterpret_cast<const unsigned int&>(pair);
}

// kCount consecutive elements of type T, moved by one access and kept packed until they are used: registers hold the
// bytes that travel, not their float32 values. All large matrices are read once and written once, so accesses are
// marked evict-first (.cs) and the maps, which several warps read, stay in the caches.
template <typename T, int kCount>
struct Vector {
  static constexpr int kWords = sizeof(T) * kCount / sizeof(unsigned int);
  static_assert(kWords == 1 || kWords == 4, "a vector is one or four 32-bit words");
  using Unit = typename UnitOf<sizeof(T) * kCount>::type;
  Unit unit;

  __device__ __forceinline__ static Vector load(const char* row, int64_t index) {
    return {__ldcs(reinterpret_cast<const Unit*>(row) + index)};
  }
  __device__ __forceinline__ void store(char* row, int64_t index) const {
    __stcs(reinterpret_cast<Unit*>(row) + index, unit);
  }
  __device__ __forceinline__ void to_float(float (&out)[kCount]) const {
    const unsigned int* words = reinterpret_cast<const unsigned int*>(&unit);
#pragma unroll
    for (int w = 0; w < kWords; ++w) unpack(words[w], T{}, out + w * (kCount / kWords));
  }
  __device__ __forceinline__ static Vector from_float(const float (&in)[kCount]) {
    Vector vector;
    unsigned int* words = reinterpret_cast<unsigned int*>(&vector.unit);
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = pack(in + w * (kCount / kWords), T{});
    return vector;
  }
};

// A single 16-bit element travels as half a word.
template <typename T>
struct HalfWord {
  unsigned short unit;

  __device__ __forceinline__ static HalfWord load(const char* row, int64_t index) {
    return {__ldcs(reinterpret_cast<const unsigned short*>(row) + index)};
  }
  __device__ __forceinline__ void store(char* row, int64_t index) const {
    __stcs(reinterpret_cast<unsigned short*>(row) + index, unit);
  }
  __device__ __forceinline__ void to_float(float (&out)[1]) const {
    float pair[2];
    unpack(unit, T{}, pair);
    out[0] = pair[0];
  }
  __device__ __forceinline__ static HalfWord from_float(const float (&in)[1]) {
    const float pair[2] = {in[0], 0.0f};
    return {static_cast<unsigned short>(pack(pair, T{}))};
  }
};
template <typename T, int kCount>
using Elements = std::conditional_t<sizeof(T) * kCount == sizeof(unsigned short), HalfWord<T>, Vector<T, kCount>>;

// Calls launch(T{}, count) with the element type and the elements of a vector: 16 bytes where every row allows it,
// else one element.
template <typename Launch>
void with_vector(DType dtype, bool wide, Launch launch) {
  const auto with_type = [&](auto element) {
    using T = decltype(element);
    if (wide) {
      launch(element, std::integral_constant<int, kVectorBytes / sizeof(T)>{});
    } else {
      launch(element, std::integral_constant<int, 1>{});
    }
  };
  switch (dtype) {
    case DType::kFloat32:
      return with_type(float{});
    case DType::kBFloat16:
      return with_type(__nv_bfloat16{});
    case DType::kFloat16:
      return with_type(__half{});
    default:
      throw std::runtime_error("megatron_moe_opt: no kernel for element type " +
                               std::to_string(static_cast<int>(dtype)));
  }
}

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
