// Vectors of float32 over the instruction set this file is compiled for: AVX-512, AVX2 or plain C++.
//
// Included only by cpu_rows.cpp, cpu_residuals.cpp and cpu_wire.cpp, which are compiled once for each instruction set;
// everything lives in a namespace named after it (MOE_OPT_ISA), so that no inline function of one set can be linked
// into the code of another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "types.h"

namespace moe_opt {
namespace MOE_OPT_ISA {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct E4M3 {
  uint8_t bits;
};

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Scalar conversions, round to nearest even; NaN stays NaN, denormals are kept.
inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return as_float(uint32_t{value.bits} << 16); }
inline float to_float(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude < 0x400u) {  // zero or denormal: an integer number of 2^-24
    const float scaled = static_cast<float>(magnitude) * 0x1p-24f;
    return as_float(sign | as_bits(scaled));
  }
  return as_float(sign | ((magnitude << 13) + (112u << 23)));
}

inline void from_float(float value, float* out) { *out = value; }
inline void from_float(float value, BFloat16* out) {
  const uint32_t bits = as_bits(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = is_nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
  out->bits = static_cast<uint16_t>(rounded >> 16);
}
inline void from_float(float value, Float16* out) {
  const uint32_t bits = as_bits(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 2^16 or more
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below the normal range the float adder rounds for us: next to 0.5 one unit in the last place is 2^-24.
    half = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}
// The largest e4m3 number is 448, and there is no infinity: larger values saturate. NaN and infinities become 0x7f.
inline float to_float(E4M3 code) {
  const uint32_t magnitude = code.bits & 0x7fu;
  if (magnitude == 0x7fu) return as_float(0x7fc00000u);
  // Of float16, whose exponent is biased by 8 more, the same bits mean 2^-8 as much, denormals included.
  return to_float(Float16{static_cast<uint16_t>((code.bits & 0x80u) << 8 | magnitude << 7)}) * 256.0f;
}
inline void from_float(float value, E4M3* out) {
  const uint32_t bits = as_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t code;
  if (magnitude >= 0x7f800000u) {
    out->bits = 0x7f;
    return;
  }
  if (magnitude < 0x3c800000u) {
    // Below the normal range, as above: next to 2^14 one unit in the last place is 2^-9.
    code = as_bits(as_float(magnitude) + 0x1p14f) - as_bits(0x1p14f);
  } else {
    code = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  }
  out->bits = static_cast<uint8_t>((bits >> 24 & 0x80u) | (code < 0x7eu ? code : 0x7eu));
}

// The larger of `largest` and the magnitude of a finite value.
inline float larger_finite(float largest, float value) {
  const float magnitude = as_float(as_bits(value) & 0x7fffffffu);
  return as_bits(magnitude) < 0x7f800000u && magnitude > largest ? magnitude : largest;
}

// Vec holds kLanes float32 values. stream() is a non-temporal store to an address aligned to the bytes it writes.
#if defined(__AVX512F__)

struct Vec {
  __m512 v;
};
constexpr int64_t kLanes = 16;

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Vec load(const Float16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }

inline __m256i pack(Vec a, const BFloat16*) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i lowest_kept = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lowest_kept, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
inline __m256i pack(Vec a, const Float16*) {
  return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void stream(float* p, Vec a) { _mm512_stream_ps(p, a.v); }
template <typename T>
inline void store(T* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack(a, p));
}
template <typename T>
inline void stream(T* p, Vec a) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), pack(a, p));
}

inline Vec larger_finite(Vec largest, Vec a) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff));
  const __mmask16 finite = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  const __m512i most = _mm512_castps_si512(largest.v);  // floats without sign are ordered as their bits
  return {_mm512_castsi512_ps(_mm512_mask_max_epi32(most, finite, most, magnitude))};
}
inline float largest_lane(Vec a) {
  return as_float(static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_castps_si512(a.v))));
}

inline Vec load(const E4M3* p) {
  const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(codes, magnitude), 8);
  const __m256i halves = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
  const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i all = _mm256_mask_mov_epi16(halves, is_nan, _mm256_set1_epi16(0x7e00));
  return {_mm512_mul_ps(_mm512_cvtph_ps(all), _mm512_set1_ps(256.0f))};
}
inline void store(E4M3* p, Vec a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  const __m512i lowest_kept = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
  const __m512i rebias = _mm512_set1_epi32(0x7ffff - (120 << 23));
  __m512i code = _mm512_srli_epi32(_mm512_add_epi32(magnitude, _mm512_add_epi32(lowest_kept, rebias)), 20);
  const __m512 shift = _mm512_set1_ps(0x1p14f);
  const __m512 small = _mm512_add_ps(_mm512_castsi512_ps(magnitude), shift);
  code = _mm512_mask_sub_epi32(code, _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x3c800000)),
                               _mm512_castps_si512(small), _mm512_castps_si512(shift));
  code = _mm512_or_si512(_mm512_min_epi32(code, _mm512_set1_epi32(0x7e)), sign);
  code = _mm512_mask_mov_epi32(code, _mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000)),
                               _mm512_set1_epi32(0x7f));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(code));
}

#elif defined(__AVX2__)

struct Vec {
  __m256 v;
};
constexpr int64_t kLanes = 8;

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline float sum(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
inline Vec load(const Float16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }

inline __m128i pack(Vec a, const BFloat16*) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i lowest_kept = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lowest_kept, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
inline __m128i pack(Vec a, const Float16*) {
  return _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void stream(float* p, Vec a) { _mm256_stream_ps(p, a.v); }
template <typename T>
inline void store(T* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack(a, p));
}
template <typename T>
inline void stream(T* p, Vec a) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), pack(a, p));
}

inline Vec larger_finite(Vec largest, Vec a) {
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(a.v), _mm256_set1_epi32(0x7fffffff));
  const __m256i finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), magnitude);
  // Floats without sign are ordered as their bits.
  return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(largest.v), _mm256_and_si256(magnitude, finite)))};
}
inline float largest_lane(Vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
  return as_float(static_cast<uint32_t>(_mm_cvtsi128_si32(most)));
}

inline Vec load(const E4M3* p) {
  const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i magnitude = _mm_and_si128(codes, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_xor_si128(codes, magnitude), 8);
  const __m128i halves = _mm_or_si128(sign, _mm_slli_epi16(magnitude, 7));
  const __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
  const __m128i all = _mm_blendv_epi8(halves, _mm_set1_epi16(0x7e00), is_nan);
  return {_mm256_mul_ps(_mm256_cvtph_ps(all), _mm256_set1_ps(256.0f))};
}
inline void store(E4M3* p, Vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  const __m256i lowest_kept = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
  const __m256i rebias = _mm256_set1_epi32(0x7ffff - (120 << 23));
  const __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(magnitude, _mm256_add_epi32(lowest_kept, rebias)), 20);
  const __m256 shift = _mm256_set1_ps(0x1p14f);
  const __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude), shift);
  const __m256i small = _mm256_sub_epi32(_mm256_castps_si256(sum), _mm256_castps_si256(shift));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), magnitude);
  __m256i code = _mm256_min_epi32(_mm256_blendv_epi8(normal, small, is_small), _mm256_set1_epi32(0x7e));
  const __m256i not_finite = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f7fffff));
  code = _mm256_blendv_epi8(_mm256_or_si256(code, sign), _mm256_set1_epi32(0x7f), not_finite);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}

#else

constexpr int64_t kLanes = 8;  // short loops that the compiler turns into whatever vectors the target has
struct Vec {
  float v[kLanes];
};

inline Vec zero() { return {}; }
inline Vec broadcast(float x) {
  Vec a;
  for (float& lane : a.v) lane = x;
  return a;
}
inline Vec add(Vec a, Vec b) {
  for (int64_t i = 0; i < kLanes; ++i) a.v[i] += b.v[i];
  return a;
}
inline Vec sub(Vec a, Vec b) {
  for (int64_t i = 0; i < kLanes; ++i) a.v[i] -= b.v[i];
  return a;
}
inline Vec mul(Vec a, Vec b) {
  for (int64_t i = 0; i < kLanes; ++i) a.v[i] *= b.v[i];
  return a;
}
inline float sum(Vec a) {
  float total = 0.0f;
  for (float lane : a.v) total += lane;
  return total;
}
template <typename T>
inline Vec load(const T* p) {
  T raw[kLanes];
  std::memcpy(raw, p, sizeof(raw));  // p may be unaligned
  Vec a;
  for (int64_t i = 0; i < kLanes; ++i) a.v[i] = to_float(raw[i]);
  return a;
}
template <typename T>
inline void store(T* p, Vec a) {
  T raw[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) from_float(a.v[i], &raw[i]);
  std::memcpy(p, raw, sizeof(raw));
}
template <typename T>
inline void stream(T* p, Vec a) {
  store(p, a);
}
inline Vec larger_finite(Vec largest, Vec a) {
  for (int64_t i = 0; i < kLanes; ++i) largest.v[i] = larger_finite(largest.v[i], a.v[i]);
  return largest;
}
inline float largest_lane(Vec a) {
  float most = 0.0f;
  for (float lane : a.v) most = lane > most ? lane : most;
  return most;
}

#endif

// One element, at any alignment.
template <typename T>
inline float load_one(const T* p) {
  T raw;
  std::memcpy(&raw, p, sizeof(raw));
  return to_float(raw);
}
template <typename T>
inline void store_one(T* p, float value) {
  T raw;
  from_float(value, &raw);
  std::memcpy(p, &raw, sizeof(raw));
}

// Returns run(T{}) with the element type; float64 has no kernels over float32 vectors.
template <typename Run>
inline auto with_element(DType dtype, Run run) {
  if (dtype == DType::kFloat32) return run(float{});
  if (dtype == DType::kBFloat16) return run(BFloat16{});
  if (dtype == DType::kFloat16) return run(Float16{});
  return decltype(run(float{}))();
}

// Whether vectors of a row's elements can be streamed there.
template <typename T>
inline bool can_stream(const T* row) {
  return reinterpret_cast<uintptr_t>(row) % (kLanes * sizeof(T)) == 0;
}
template <bool kStreaming, typename T>
inline void put(T* p, Vec a) {
  if constexpr (kStreaming) {
    stream(p, a);
  } else {
    store(p, a);
  }
}

// Orders the non-temporal stores of this thread before whatever it does next.
inline void stream_fence() {
#if defined(__AVX512F__) || defined(__AVX2__)
  _mm_sfence();
#endif
}

// Copies bytes; with `streaming` past the caches. Source and target must not overlap.
inline void copy_bytes(uint8_t* target, const uint8_t* source, int64_t bytes, bool streaming) {
  if (bytes == 0) return;  // of tensors without elements, whose pointers may be null, which memcpy never takes
#if defined(__AVX512F__) || defined(__AVX2__)
  if (streaming && bytes >= 256) {
    const int64_t head = -reinterpret_cast<intptr_t>(target) & 63;  // up to the next cache line
    std::memcpy(target, source, head);
    int64_t i = head;
    for (; i + 64 <= bytes; i += 64) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_loadu_si512(source + i));
#else
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i + 32));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i), low);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i + 32), high);
#endif
    }
    std::memcpy(target + i, source + i, bytes - i);
    return;
  }
#else
  (void)streaming;
#endif
  std::memcpy(target, source, bytes);
}

}  // namespace MOE_OPT_ISA
}  // namespace moe_opt
