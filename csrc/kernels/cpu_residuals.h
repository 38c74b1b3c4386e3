// The inner loops of residual_codec.h for one instruction set; see cpu_residuals.cpp.
#pragma once

#include <cstdint>

#include "types.h"

namespace moe_opt {

// Bits [shift, shift + bits) of a 31-bit magnitude.
struct Digit {
  int shift;
  int bits;
};

// What is left of a range's share of the k kept entries.
struct Quota {
  int64_t entries;  // all it may still keep
  int64_t ties;     // those of them whose magnitude is exactly the k-th
};

// A magnitude is a float32's bits without the sign, so that it orders as the absolute value does; every NaN has the
// same. Places are offsets from the first element given.
struct ResidualKernels {
  // Appends the residuals of magnitude `least` and above, and their places, in order; returns how many. The outputs
  // have room for `count` of them, and may be overwritten up to there. count <= 65536.
  int64_t (*select)(DType dtype, const void* expert, const void* shared, int64_t count, uint32_t least,
                    float* residuals, uint16_t* places);
  // histogram[digit] += 1 for every residual whose magnitude continues `prefix`, the bits above the digit.
  void (*count_digits)(const float* residuals, int64_t count, uint32_t prefix, Digit digit, uint32_t* histogram);
  // Writes the residuals above the k-th magnitude, and ties with it, while the quota lasts; returns how many. Where
  // they are whole elements of `expert`, see residual_codec.h, these take their place.
  int64_t (*keep)(DType dtype, const float* residuals, const uint16_t* places, int64_t count, uint32_t kth,
                  Quota* quota, const void* expert, const void* shared, void* values, uint16_t* kept_places);
  // Adds values[i] to the element at places[i], or puts the whole element there that values[i] stands for. False where
  // the places do not ascend inside [0, count).
  bool (*decode)(DType dtype, const void* values, const uint16_t* places, int64_t entries, void* expert, int64_t count);
};

}  // namespace moe_opt
