// The residual kernels for one instruction set, compiled as cpu_rows.cpp is.
#include "cpu_residuals.h"

#include <cstring>
#include <type_traits>

#include "cpu_vector.h"

namespace moe_opt {
namespace MOE_OPT_ISA {
namespace {

constexpr uint32_t kMagnitudeBits = 0x7fffffffu;
constexpr uint32_t kNaNMagnitude = 0x7f800001u;  // the least that a NaN can have

uint32_t magnitude(float residual) {
  const uint32_t bits = as_bits(residual) & kMagnitudeBits;
  return bits < kNaNMagnitude ? bits : kNaNMagnitude;
}

// Writes the lanes of magnitude `least` and above side by side, with their places from `first` on; returns how many.
// Without a branch, as which lanes these are cannot be predicted: all kLanes outputs may be overwritten.
#if defined(__AVX512F__)

int64_t append(Vec residual, uint32_t least, int64_t first, float* residuals, uint16_t* places) {
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(residual.v), _mm512_set1_epi32(kMagnitudeBits));
  const __mmask16 chosen = _mm512_cmpge_epu32_mask(bits, _mm512_set1_epi32(static_cast<int>(least)));
  // Counted before anything is stored: GCC 12 spills the mask as 16 bits across a call, such as a sanitizer's for a
  // store, and counts 32 of them behind it.
  const int64_t count = __builtin_popcount(chosen);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(first)));
  // Compressed in registers and stored whole: a compressing store is slow on some processors.
  _mm512_storeu_ps(residuals, _mm512_maskz_compress_ps(chosen, residual.v));
  const __m512i chosen_places = _mm512_maskz_compress_epi32(chosen, place);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(places), _mm512_cvtepi32_epi16(chosen_places));
  return count;
}

#elif defined(__AVX2__)

// The numbers of the set bits of every byte, in front.
struct SetBits {
  uint8_t of[256][8];
  constexpr SetBits() : of() {
    for (int byte = 0; byte < 256; ++byte) {
      int count = 0;
      for (uint8_t bit = 0; bit < 8; ++bit) {
        if (byte >> bit & 1) of[byte][count++] = bit;
      }
    }
  }
};
constexpr SetBits kSetBits;

int64_t append(Vec residual, uint32_t least, int64_t first, float* residuals, uint16_t* places) {
  const __m256i bits = _mm256_and_si256(_mm256_castps_si256(residual.v), _mm256_set1_epi32(kMagnitudeBits));
  const __m256i chosen = _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(static_cast<int>(least) - 1));
  const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(chosen));
  const __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kSetBits.of[mask]));
  _mm256_storeu_ps(residuals, _mm256_permutevar8x32_ps(residual.v, _mm256_cvtepu8_epi32(lanes)));
  const __m128i place = _mm_add_epi16(_mm_cvtepu8_epi16(lanes), _mm_set1_epi16(static_cast<int16_t>(first)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(places), place);
  return __builtin_popcount(mask);
}

#else

int64_t append(Vec residual, uint32_t least, int64_t first, float* residuals, uint16_t* places) {
  int64_t count = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    residuals[count] = residual.v[lane];
    places[count] = static_cast<uint16_t>(first + lane);
    count += magnitude(residual.v[lane]) >= least;
  }
  return count;
}

#endif

template <typename T>
int64_t select_of(const T* expert, const T* shared, int64_t count, uint32_t least, float* residuals, uint16_t* places) {
  int64_t chosen = 0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    chosen += append(sub(load(expert + i), load(shared + i)), least, i, residuals + chosen, places + chosen);
  }
  for (; i < count; ++i) {
    const float residual = load_one(expert + i) - load_one(shared + i);
    if (magnitude(residual) < least) continue;
    residuals[chosen] = residual;
    places[chosen++] = static_cast<uint16_t>(i);
  }
  return chosen;
}

int64_t select(DType dtype, const void* expert, const void* shared, int64_t count, uint32_t least, float* residuals,
               uint16_t* places) {
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    return select_of(static_cast<const T*>(expert), static_cast<const T*>(shared), count, least, residuals, places);
  });
}

void count_digits(const float* residuals, int64_t count, uint32_t prefix, Digit digit, uint32_t* histogram) {
  const uint32_t mask = (1u << digit.bits) - 1;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t upper = magnitude(residuals[i]) >> digit.shift;
    histogram[upper & mask] += upper >> digit.bits == prefix;
  }
}

bool is_finite(float value) { return (as_bits(value) & 0x7f800000u) != 0x7f800000u; }

float largest_binade(float) { return 0x1p127f; }
float largest_binade(BFloat16) { return 0x1p127f; }
float largest_binade(Float16) { return 0x1p15f; }

// What decode makes of an element of `shared` and its entry.
template <typename T>
T decoded(T shared, T value) {
  T sum;
  from_float(to_float(shared) + to_float(value), &sum);
  if (is_finite(to_float(sum))) return sum;
  if (is_finite(to_float(value))) from_float(-to_float(value), &value);
  return value;
}

// The value of an entry whose residual, rounded to `value`, may be one of those that overflow.
template <typename T>
T exact_value(T expert, T shared, T value) {
  if (!is_finite(to_float(expert))) return expert;
  T sum;
  from_float(to_float(shared) + to_float(value), &sum);
  if (is_finite(to_float(sum))) return value;
  if (is_finite(to_float(shared)) && is_finite(to_float(value))) {
    // Rounded away from zero, past the largest element: the one below is as near.
    std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t> bits;
    std::memcpy(&bits, &value, sizeof(bits));
    --bits;
    std::memcpy(&value, &bits, sizeof(bits));
    return value;
  }
  from_float(-to_float(expert), &value);
  return value;
}

template <typename T>
T load_raw(const T* p) {
  T raw;
  std::memcpy(&raw, p, sizeof(raw));
  return raw;
}

template <typename T>
int64_t keep_of(const float* residuals, const uint16_t* places, int64_t count, uint32_t kth, Quota* quota,
                const T* expert, const T* shared, T* values, uint16_t* kept_places) {
  const int64_t room = quota->entries;
  int64_t ties = quota->ties;
  int64_t kept = 0;
  for (int64_t i = 0; i < count && kept < room; ++i) {
    const uint32_t size = magnitude(residuals[i]);
    const bool tie = size == kth && ties > 0;
    store_one(values + kept, residuals[i]);  // overwritten by the next one, unless it is kept
    kept_places[kept] = places[i];
    kept += size > kth || tie;
    ties -= tie;
  }
  // Only sums with a value of the largest binade, or with one that is not finite, overflow.
  for (int64_t i = 0; i < kept; ++i) {
    const T value = load_raw(values + i);
    if ((as_bits(to_float(value)) & kMagnitudeBits) < as_bits(largest_binade(T{}))) continue;
    const int64_t place = kept_places[i];
    const T exact = exact_value(load_raw(expert + place), load_raw(shared + place), value);
    std::memcpy(values + i, &exact, sizeof(exact));
  }
  *quota = {room - kept, ties};
  return kept;
}

int64_t keep(DType dtype, const float* residuals, const uint16_t* places, int64_t count, uint32_t kth, Quota* quota,
             const void* expert, const void* shared, void* values, uint16_t* kept_places) {
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    return keep_of(residuals, places, count, kth, quota, static_cast<const T*>(expert), static_cast<const T*>(shared),
                   static_cast<T*>(values), kept_places);
  });
}

template <typename T>
bool decode_of(const T* values, const uint16_t* places, int64_t entries, T* expert, int64_t count) {
  int64_t lowest = 0;
  for (int64_t entry = 0; entry < entries; ++entry) {
    const int64_t place = places[entry];
    if (place < lowest || place >= count) return false;
    const T whole = decoded(load_raw(expert + place), load_raw(values + entry));
    std::memcpy(expert + place, &whole, sizeof(whole));
    lowest = place + 1;
  }
  return true;
}

bool decode(DType dtype, const void* values, const uint16_t* places, int64_t entries, void* expert, int64_t count) {
  return with_element(dtype, [&](auto element) {
    using T = decltype(element);
    return decode_of(static_cast<const T*>(values), places, entries, static_cast<T*>(expert), count);
  });
}

}  // namespace

extern const ResidualKernels residual_kernels;
const ResidualKernels residual_kernels = {select, count_digits, keep, decode};

}  // namespace MOE_OPT_ISA
}  // namespace moe_opt
