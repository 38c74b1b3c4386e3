// The formats of rows on CUDA, sixteen elements of one thread at a time: 16 bytes of codes, two or four accesses of 16
// bytes where elements are wider. See wire_format.h for what is computed.
#pragma once

#include "cuda_common.cuh"
#include "wire_format.h"

namespace moe_opt {
namespace cuda {

constexpr int kPiece = 16;  // elements of a row that a thread converts together

// The rows of one side of a conversion. `wide`: every piece is whole, and moved by accesses of 16 bytes.
struct Side {
  char* data;
  int64_t stride;   // bytes
  int64_t hidden;   // elements
  int64_t scales;   // the byte of a row at which they begin
  int64_t payload;  // bytes
  bool wide;

  __device__ __forceinline__ char* row(int64_t index) const { return data + index * stride; }
};
template <typename Rows>
Side side_of(DType format, int64_t hidden, const Rows& rows) {
  const bool wide = hidden % kPiece == 0 && rows_aligned(kVectorBytes, rows);
  const int64_t scales = has_scales(format) ? first_scale(format, hidden) : 0;
  char* data = static_cast<char*>(const_cast<void*>(rows.data));
  return {data, rows.stride_bytes, hidden, scales, payload_bytes(format, hidden), wide};
}

// Elements of a dtype. Every format has: Packed, what a piece is in registers; load, widen, narrow and store;
// kTogether, the threads side by side that call narrow() together, with pieces side by side.
template <DType kFormat, typename T>
struct PlainFormat {
  static constexpr DType kDType = kFormat;
  static constexpr int kTogether = 1;
  static constexpr int kUnits = sizeof(T);  // of 16 bytes, in a piece
  static constexpr int kWordElements = sizeof(unsigned int) / sizeof(T);
  struct Packed {
    uint4 units[kUnits];

    __device__ __forceinline__ unsigned int* words() { return reinterpret_cast<unsigned int*>(units); }
    __device__ __forceinline__ const unsigned int* words() const {
      return reinterpret_cast<const unsigned int*>(units);
    }
  };
  using Element = typename UnitOf<sizeof(T)>::type;

  __device__ __forceinline__ static Packed load(const Side& side, const char* row, int64_t piece) {
    Packed packed;
    if (side.wide) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        packed.units[u] = __ldcs(reinterpret_cast<const uint4*>(row) + piece * kUnits + u);
      }
      return packed;
    }
#pragma unroll
    for (int w = 0; w < kPiece / kWordElements; ++w) {
      unsigned int word = 0;
#pragma unroll
      for (int e = 0; e < kWordElements; ++e) {
        const int64_t h = piece * kPiece + w * kWordElements + e;
        if (h < side.hidden) {
          word |= static_cast<unsigned int>(__ldcs(reinterpret_cast<const Element*>(row) + h)) << (16 * e);
        }
      }
      packed.words()[w] = word;
    }
    return packed;
  }
  __device__ __forceinline__ static void widen(const Packed& packed, float (&out)[kPiece]) {
#pragma unroll
    for (int w = 0; w < kPiece / kWordElements; ++w) unpack(packed.words()[w], T{}, out + w * kWordElements);
  }
  __device__ __forceinline__ static Packed narrow(const float (&in)[kPiece]) {
    Packed packed;
#pragma unroll
    for (int w = 0; w < kPiece / kWordElements; ++w) packed.words()[w] = pack(in + w * kWordElements, T{});
    return packed;
  }
  __device__ __forceinline__ static void store(const Packed& packed, const Side& side, char* row, int64_t piece) {
    if (side.wide) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if (piece * kPiece < side.hidden) __stcs(reinterpret_cast<uint4*>(row) + piece * kUnits + u, packed.units[u]);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const int64_t h = piece * kPiece + i;
      const unsigned int word = packed.words()[i / kWordElements] >> (16 * (i % kWordElements));
      if (h < side.hidden) __stcs(reinterpret_cast<Element*>(row) + h, static_cast<Element>(word));
    }
  }
};

// Instructions that convert e4m3: of sm_90, and from CUDA 12.1 on of sm_89.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ >= 900 || (__CUDA_ARCH__ >= 890 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201))
#define MOE_OPT_CVT_E4M3
#endif

// Two codes, the first in the low byte; the values are NaN, or at most 512 in magnitude.
__device__ __forceinline__ unsigned int code_of(float value) {
  const unsigned int bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  // Next to 2^14 one unit in the last place is that of codes below their normal range, 2^-9.
  const unsigned int small = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) - 0x46800000u;
  const unsigned int normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  const unsigned int code = min(magnitude < 0x3c800000u ? small : normal, 0x7eu) | (bits >> 24 & 0x80u);
  return magnitude < 0x7f800000u ? code : 0x7fu;
}
__device__ __forceinline__ unsigned int codes_of(float first, float second) {
#ifdef MOE_OPT_CVT_E4M3
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(first), "f"(second));
  return codes;
#else
  return code_of(first) | code_of(second) << 8;
#endif
}

// The values of two codes, exactly.
__device__ __forceinline__ void values_of(unsigned int codes, float* out) {
#ifdef MOE_OPT_CVT_E4M3
  unsigned int halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(codes)));
  unpack(halves, __half{}, out);
#else
  // Of float16, whose exponent is biased by 8 more, the same bits mean 2^-8 as much, denormals included.
  const unsigned int spread = (codes & 0xffu) | (codes & 0xff00u) << 8;
  unpack((spread & 0x00800080u) << 8 | (spread & 0x007f007fu) << 7, __half{}, out);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool is_nan = (codes >> (8 * i) & 0x7fu) == 0x7fu;
    out[i] = is_nan ? __uint_as_float(0x7fc00000u) : __fmul_rn(out[i], 256.0f);
  }
#endif
}

// Codes with scales.
template <DType kFormat>
struct CodedFormat {
  static constexpr DType kDType = kFormat;
  static constexpr int kTogether = kWarp;
  static constexpr int kLanes = static_cast<int>(block_elements(kFormat)) / kPiece;  // that have a scale in common
  static constexpr int kScaleBytes = static_cast<int>(scale_bytes(kFormat));
  struct Packed {
    uint4 codes;
    unsigned int scale;  // a float32's bits, or an e8m0 byte

    __device__ __forceinline__ unsigned int* words() { return reinterpret_cast<unsigned int*>(&codes); }
    __device__ __forceinline__ const unsigned int* words() const {
      return reinterpret_cast<const unsigned int*>(&codes);
    }
  };

  __device__ __forceinline__ static int64_t scale_place(const Side& side, int64_t piece) {
    return side.scales + piece / kLanes * kScaleBytes;
  }

  __device__ __forceinline__ static Packed load(const Side& side, const char* row, int64_t piece) {
    Packed packed;
    const char* scale = row + scale_place(side, piece);
    if (side.wide) {
      packed.codes = __ldcs(reinterpret_cast<const uint4*>(row) + piece);
      packed.scale = kFormat == DType::kFp8 ? *reinterpret_cast<const unsigned int*>(scale)
                                            : *reinterpret_cast<const unsigned char*>(scale);
      return packed;
    }
#pragma unroll
    for (int w = 0; w < kPiece / 4; ++w) {
      unsigned int word = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t h = piece * kPiece + w * 4 + e;
        if (h < side.hidden) {
          word |= static_cast<unsigned int>(__ldcs(reinterpret_cast<const unsigned char*>(row) + h)) << (8 * e);
        }
      }
      packed.words()[w] = word;
    }
    packed.scale = 0;
#pragma unroll
    for (int b = 0; b < kScaleBytes; ++b) {
      packed.scale |= static_cast<unsigned int>(reinterpret_cast<const unsigned char*>(scale)[b]) << (8 * b);
    }
    return packed;
  }
  __device__ __forceinline__ static void widen(const Packed& packed, float (&out)[kPiece]) {
    const unsigned int power = packed.scale == 0 ? 0x400000u : packed.scale << 23;
    const float scale = __uint_as_float(kFormat == DType::kFp8 ? packed.scale : power);
#pragma unroll
    for (int w = 0; w < kPiece / 4; ++w) {
      values_of(packed.words()[w] & 0xffffu, out + 4 * w);
      values_of(packed.words()[w] >> 16, out + 4 * w + 2);
    }
#pragma unroll
    for (int i = 0; i < kPiece; ++i) out[i] = __fmul_rn(out[i], scale);
  }
  __device__ __forceinline__ static Packed narrow(const float (&in)[kPiece]) {
    unsigned int largest = 0;  // magnitudes are ordered as their bits
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const unsigned int magnitude = __float_as_uint(in[i]) & 0x7fffffffu;
      largest = max(largest, magnitude < 0x7f800000u ? magnitude : 0u);
    }
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    Packed packed;
    float inverse;
    if constexpr (kFormat == DType::kFp8) {
      const float wanted = __fdiv_rn(__uint_as_float(largest), 448.0f);
      const float scale = wanted > 0x1p-126f ? wanted : 0x1p-126f;
      packed.scale = __float_as_uint(scale);
      inverse = __fdiv_rn(1.0f, scale);
    } else {
      packed.scale = static_cast<unsigned int>(max(0, min(246, static_cast<int>((largest + 0x1fffffu) >> 23) - 8)));
      inverse = __uint_as_float((254u - packed.scale) << 23);
    }
    const auto scaled = [&](int i) {
      const bool finite = (__float_as_uint(in[i]) & 0x7fffffffu) < 0x7f800000u;
      return finite ? __fmul_rn(in[i], inverse) : __uint_as_float(0x7fffffffu);
    };
#pragma unroll
    for (int w = 0; w < kPiece / 4; ++w) {
      packed.words()[w] = codes_of(scaled(4 * w), scaled(4 * w + 1)) | codes_of(scaled(4 * w + 2), scaled(4 * w + 3))
                                                                           << 16;
    }
    return packed;
  }
  __device__ __forceinline__ static void store(const Packed& packed, const Side& side, char* row, int64_t piece) {
    if (piece * kPiece >= side.hidden) return;
    if (side.wide) {
      __stcs(reinterpret_cast<uint4*>(row) + piece, packed.codes);
    } else {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const int64_t h = piece * kPiece + i;
        if (h < side.hidden) row[h] = static_cast<char>(packed.words()[i / 4] >> (8 * (i % 4)));
      }
    }
    if (piece % kLanes != 0) return;
    char* scale = row + scale_place(side, piece);
    if (side.wide && kFormat == DType::kFp8) {
      *reinterpret_cast<unsigned int*>(scale) = packed.scale;
    } else {
#pragma unroll
      for (int b = 0; b < kScaleBytes; ++b) {
        scale[b] = static_cast<char>(packed.scale >> (8 * b));
      }
    }
    if ((piece + kLanes) * kPiece < side.hidden) return;
    for (int64_t i = side.hidden; i < side.scales; ++i) row[i] = 0;
    for (int64_t i = scale_place(side, piece) + kScaleBytes; i < side.payload; ++i) row[i] = 0;
  }
};

struct Float32Rows : PlainFormat<DType::kFloat32, float> {};
struct BFloat16Rows : PlainFormat<DType::kBFloat16, __nv_bfloat16> {};
struct Float16Rows : PlainFormat<DType::kFloat16, __half> {};
struct Fp8Rows : CodedFormat<DType::kFp8> {};
struct Mxfp8Rows : CodedFormat<DType::kMxfp8> {};

// Whether the thread whose piece is this one has work, or belongs to those who work together.
template <typename To>
__device__ __forceinline__ bool is_called(const Side& target, int64_t piece) {
  return piece / To::kTogether * To::kTogether * kPiece < target.hidden;
}

// The same number, of which the compiler knows nothing: what depends on it is not computed ahead of a loop over rows,
// where it would take registers for every element of a piece.
__device__ __forceinline__ int64_t hidden_from_compiler(int64_t number) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(number));
#endif
  return number;
}

// A piece of a row, which may lie past its end, in registers: nothing is read there.
template <typename From>
__device__ __forceinline__ void read_piece(const Side& side, int64_t row, int64_t piece, float (&out)[kPiece]) {
  if (piece * kPiece < side.hidden) {
    From::widen(From::load(side, side.row(row), piece), out);
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) out[i] = 0.0f;
  }
}

template <typename Launch>
void with_format(DType format, Launch launch) {
  switch (format) {
    case DType::kFloat32:
      return launch(Float32Rows{});
    case DType::kBFloat16:
      return launch(BFloat16Rows{});
    case DType::kFloat16:
      return launch(Float16Rows{});
    case DType::kFp8:
      return launch(Fp8Rows{});
    case DType::kMxfp8:
      return launch(Mxfp8Rows{});
    default:
      throw std::runtime_error("megatron_moe_opt: no kernel for rows of format " +
                               std::to_string(static_cast<int>(format)));
  }
}

// Calls launch(From{}, To{}) with the formats; kSums: those that are added, else those that are converted.
template <bool kSums, typename Launch>
void with_formats(DType from, DType to, Launch launch) {
  if (!(kSums ? sums(from, to) : converts(from, to))) {
    throw std::runtime_error("megatron_moe_opt: no kernel from rows of format " +
                             std::to_string(static_cast<int>(from)) + " to " + std::to_string(static_cast<int>(to)));
  }
  with_format(from, [&](auto of_source) {
    with_format(to, [&](auto of_target) {
      using From = decltype(of_source);
      using To = decltype(of_target);
      if constexpr (kSums ? sums(From::kDType, To::kDType) : converts(From::kDType, To::kDType)) {
        launch(of_source, of_target);
      }
    });
  });
}

}  // namespace cuda
}  // namespace moe_opt
