// The conversions of wire_format.h for one instruction set, compiled as cpu_rows.cpp is.
#include "cpu_wire.h"

#include "cpu_vector.h"
#include "wire_format.h"

namespace moe_opt {
namespace MOE_OPT_ISA {
namespace {

constexpr int64_t kGroup = 32;   // elements that have one scale in every format
constexpr int64_t kStep = 128;   // elements of a row that are worked on together: whole blocks of every format
constexpr float kLargest = 448;  // the largest code

template <DType kFormat, typename T>
struct Format {
  static constexpr DType kDType = kFormat;
  using Element = T;
};

// Calls run with the format's type.
template <typename Run>
void with_format(DType format, Run run) {
  switch (format) {
    case DType::kFloat32:
      return run(Format<DType::kFloat32, float>{});
    case DType::kBFloat16:
      return run(Format<DType::kBFloat16, BFloat16>{});
    case DType::kFloat16:
      return run(Format<DType::kFloat16, Float16>{});
    case DType::kFp8:
      return run(Format<DType::kFp8, E4M3>{});
    case DType::kMxfp8:
      return run(Format<DType::kMxfp8, E4M3>{});
    default:
      return;
  }
}

// The scale of a row's elements from `first` on, which are in one block; 1 where there are no scales.
template <DType kFormat>
float scale_of(const uint8_t* row, int64_t hidden, int64_t first) {
  if constexpr (!has_scales(kFormat)) return 1.0f;
  const uint8_t* place = row + first_scale(kFormat, hidden) + first / block_elements(kFormat) * scale_bytes(kFormat);
  if constexpr (kFormat == DType::kFp8) {
    float scale;
    std::memcpy(&scale, place, sizeof(scale));
    return scale;
  }
  return as_float(*place == 0 ? 0x400000u : uint32_t{*place} << 23);
}

// Writes the scale of a block at `place`, and returns what its elements are multiplied by.
template <DType kFormat>
float write_scale(float largest, uint8_t* place) {
  if constexpr (kFormat == DType::kFp8) {
    const float wanted = largest / kLargest;
    const float scale = wanted > 0x1p-126f ? wanted : 0x1p-126f;
    std::memcpy(place, &scale, sizeof(scale));
    return 1.0f / scale;
  }
  // One exponent more where the mantissa is above 1.75: the carry of this sum.
  const int32_t exponent = static_cast<int32_t>((as_bits(largest) + 0x1fffffu) >> 23) - 8;
  const uint32_t byte = exponent < 0 ? 0 : exponent > 246 ? 246 : static_cast<uint32_t>(exponent);
  *place = static_cast<uint8_t>(byte);
  return as_float((254 - byte) << 23);
}

// The codes of one block.
template <DType kFormat, typename T>
[[gnu::always_inline]] inline void narrow_block(const T* elements, int64_t count, uint8_t* codes, uint8_t* scale) {
  Vec most = zero();
  int64_t h = 0;
  for (; h + kLanes <= count; h += kLanes) most = larger_finite(most, load(elements + h));
  float largest = largest_lane(most);
  for (; h < count; ++h) largest = larger_finite(largest, load_one(elements + h));
  const float inverse = write_scale<kFormat>(largest, scale);
  const Vec inverses = broadcast(inverse);
  E4M3* out = reinterpret_cast<E4M3*>(codes);
  for (h = 0; h + kLanes <= count; h += kLanes) store(out + h, mul(load(elements + h), inverses));
  for (; h < count; ++h) store_one(out + h, load_one(elements + h) * inverse);
}

// Writes the elements [first, first + count) of a row, count <= kStep, first a multiple of kStep.
template <typename To, bool kStreaming, typename T>
inline void write_step(const T* elements, int64_t count, int64_t hidden, int64_t first, uint8_t* row) {
  constexpr DType kFormat = To::kDType;
  if constexpr (has_scales(kFormat)) {
    constexpr int64_t kBlock = block_elements(kFormat);
    uint8_t* scales = row + first_scale(kFormat, hidden) + first / kBlock * scale_bytes(kFormat);
    int64_t h = 0;
    for (; h + kBlock <= count; h += kBlock, scales += scale_bytes(kFormat)) {
      narrow_block<kFormat>(elements + h, kBlock, row + first + h, scales);
    }
    if (h < count) narrow_block<kFormat>(elements + h, count - h, row + first + h, scales);
  } else {
    auto* out = reinterpret_cast<typename To::Element*>(row) + first;
    int64_t h = 0;
    for (; h + kLanes <= count; h += kLanes) put<kStreaming>(out + h, load(elements + h));
    for (; h < count; ++h) store_one(out + h, load_one(elements + h));
  }
}

// What is neither code nor scale in a payload.
template <DType kFormat>
void write_zeros(int64_t hidden, uint8_t* row) {
  if constexpr (has_scales(kFormat)) {
    if (hidden == 0) return;  // an empty row may be at no address, which memset must not get
    const int64_t scales = first_scale(kFormat, hidden);
    const int64_t end = scales + num_blocks(kFormat, hidden) * scale_bytes(kFormat);
    std::memset(row + hidden, 0, scales - hidden);
    std::memset(row + end, 0, payload_bytes(kFormat, hidden) - end);
  }
}

// total += the elements [first, first + count) of each row, count <= kStep; total = that of the first row where it is
// not the sum from zero.
template <typename From>
inline void sum_step(const uint8_t* const* rows, int64_t num_rows, bool from_zero, int64_t hidden, int64_t first,
                     int64_t count, float* total) {
  using T = typename From::Element;
  constexpr int64_t kVectors = kGroup / kLanes;
  const auto elements = [&](int64_t r, int64_t h) { return reinterpret_cast<const T*>(rows[r]) + first + h; };
  for (int64_t h = 0; h < count; h += kGroup) {
    const auto scale = [&](int64_t r) { return scale_of<From::kDType>(rows[r], hidden, first + h); };
    if (h + kGroup <= count) {
      Vec sum[kVectors] = {};
      for (int64_t r = 0; r < num_rows; ++r) {
        [[maybe_unused]] const Vec scales = has_scales(From::kDType) ? broadcast(scale(r)) : zero();
        for (int64_t v = 0; v < kVectors; ++v) {
          Vec term = load(elements(r, h) + v * kLanes);
          if constexpr (has_scales(From::kDType)) term = mul(term, scales);
          sum[v] = r == 0 && !from_zero ? term : add(sum[v], term);
        }
      }
      for (int64_t v = 0; v < kVectors; ++v) store(total + h + v * kLanes, sum[v]);
      continue;
    }
    for (int64_t i = h; i < count; ++i) {
      float sum = 0.0f;
      for (int64_t r = 0; r < num_rows; ++r) {
        float term = load_one(elements(r, i));
        if constexpr (has_scales(From::kDType)) term *= scale(r);
        sum = r == 0 && !from_zero ? term : sum + term;
      }
      total[i] = sum;
    }
  }
}

template <typename From, typename To, bool kStreaming>
void convert_row(int64_t hidden, const uint8_t* source, uint8_t* target) {
  for (int64_t first = 0; first < hidden; first += kStep) {
    const int64_t count = hidden - first < kStep ? hidden - first : kStep;
    if constexpr (has_scales(From::kDType)) {
      alignas(64) float values[kStep];
      sum_step<From>(&source, 1, false, hidden, first, count, values);
      write_step<To, kStreaming>(values, count, hidden, first, target);
    } else {
      const auto* elements = reinterpret_cast<const typename From::Element*>(source) + first;
      write_step<To, kStreaming>(elements, count, hidden, first, target);
    }
  }
  write_zeros<To::kDType>(hidden, target);
}

template <typename From, typename To>
void convert_of(int64_t hidden, ConstRows source, const int64_t* sources, MutableRows target, int64_t begin,
                int64_t end, bool streaming) {
  for (int64_t r = begin; r < end; ++r) {
    const int64_t row = sources == nullptr ? r : sources[r];
    const uint8_t* in = source.row(row);
    uint8_t* out = target.row(r);
    if constexpr (!has_scales(To::kDType)) {
      if (streaming && can_stream(reinterpret_cast<typename To::Element*>(out))) {
        convert_row<From, To, true>(hidden, in, out);
        continue;
      }
    }
    convert_row<From, To, false>(hidden, in, out);
  }
  if (streaming) stream_fence();
}

void convert(DType from, DType to, int64_t hidden, ConstRows source, const int64_t* sources, MutableRows target,
             int64_t begin, int64_t end, bool streaming) {
  with_format(from, [&](auto of_source) {
    with_format(to, [&](auto of_target) {
      using From = decltype(of_source);
      using To = decltype(of_target);
      if constexpr (converts(From::kDType, To::kDType)) {
        convert_of<From, To>(hidden, source, sources, target, begin, end, streaming);
      }
    });
  });
}

void sum(DType from, DType to, int64_t hidden, const uint8_t* const* rows, int64_t num_rows, bool from_zero,
         uint8_t* target) {
  with_format(from, [&](auto of_rows) {
    with_format(to, [&](auto of_target) {
      using From = decltype(of_rows);
      using To = decltype(of_target);
      if constexpr (sums(From::kDType, To::kDType)) {
        for (int64_t first = 0; first < hidden; first += kStep) {
          const int64_t count = hidden - first < kStep ? hidden - first : kStep;
          alignas(64) float total[kStep];
          sum_step<From>(rows, num_rows, from_zero, hidden, first, count, total);
          write_step<To, false>(total, count, hidden, first, target);
        }
        write_zeros<To::kDType>(hidden, target);
      }
    });
  });
}

}  // namespace

extern const WireKernels wire_kernels;
const WireKernels wire_kernels = {convert, sum};

}  // namespace MOE_OPT_ISA
}  // namespace moe_opt
