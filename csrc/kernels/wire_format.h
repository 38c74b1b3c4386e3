// Rows narrower in transit than in compute: what a row of 8 bits holds, and conversions from and to rows of a dtype.
//
// A row of DType::kFp8 or kMxfp8 is
//
//     [hidden codes | zeros up to the alignment of a scale | scales | zeros up to 16 bytes]
//
// A code is an e4m3fn number: 4 bits of exponent, 3 of mantissa, largest 448, no infinity. The elements of a block,
// the last of which may be short, share a scale; with `amax` the largest magnitude of the block's finite elements,
//
//     kFp8    blocks of 128; scale = amax / 448, at least 2^-126, a float32
//     kMxfp8  blocks of 32; scale = the least power of two with amax / scale <= 448, in [2^-127, 2^119], as e8m0
//             (a byte, the exponent plus 127): the microscaling format of the OCP. Its sample algorithm takes
//             floor(log2(amax)) - 8 for the exponent, with which what is above 448 / 512 of a power of two would lose
//             up to an eighth; here the exponent is one more for these blocks.
//     code  = e4m3fn(x * (1 / scale)), each product and quotient a float32 rounded to nearest even; the code too, to at
//             most +-448; a NaN or an infinity becomes the code 0x7f, a NaN
//     value = float32(code) * scale, then rounded once to the dtype of the rows it goes to
//
// so that |value - x| <= max(2^-4 |x|, 2^-17 amax) for a finite x in float32, bfloat16 and float16 rows, as long as
// amax / 448 is at least the least scale and at most the largest; what is smaller keeps steps of 2^-9 of that scale.
// Rows in bfloat16 have no scales. Denormals are kept everywhere. CPU and CUDA give the same bits, those of NaNs in
// rows of a dtype aside.
#pragma once

#include <cstdint>

#include "types.h"

namespace moe_opt {

constexpr bool has_scales(DType format) { return format == DType::kFp8 || format == DType::kMxfp8; }

// Of the formats with scales alone.
constexpr int64_t block_elements(DType format) { return format == DType::kFp8 ? 128 : 32; }
constexpr int64_t scale_bytes(DType format) { return format == DType::kFp8 ? 4 : 1; }
constexpr int64_t num_blocks(DType format, int64_t hidden) {
  return (hidden + block_elements(format) - 1) / block_elements(format);
}
constexpr int64_t first_scale(DType format, int64_t hidden) {
  return (hidden + scale_bytes(format) - 1) / scale_bytes(format) * scale_bytes(format);
}

// Bytes of `hidden` elements, and of their scales; megatron_moe_opt/row_format.py holds the same numbers.
constexpr int64_t payload_bytes(DType format, int64_t hidden) {
  if (!has_scales(format)) return hidden * element_size(format);
  constexpr int64_t kAlignment = 16;
  const int64_t end = first_scale(format, hidden) + num_blocks(format, hidden) * scale_bytes(format);
  return (end + kAlignment - 1) / kAlignment * kAlignment;
}

// Whether there are kernels that read rows of one format and write another, or sums in it. Rows on the wire are
// converted from and to a dtype; of two dtypes one is bfloat16, that of a wire.
constexpr bool converts(DType from, DType to) {
  if (from == DType::kFloat64 || to == DType::kFloat64 || from == to) return false;
  if (has_scales(from) && has_scales(to)) return false;
  return has_scales(from) || has_scales(to) || from == DType::kBFloat16 || to == DType::kBFloat16;
}
constexpr bool sums(DType from, DType to) { return converts(from, to) || (from == to && has_scales(from)); }

// target[r] = source[sources[r]], or source[r] where sources is null; converts(from, to). What is behind the payload of
// a target row is left alone. Rows do not overlap; those of 8 bits may lie anywhere.
namespace cpu {
// Works on the target's rows [begin, end) of num_rows; the caller splits them over threads.
void convert_rows(DType from, DType to, int64_t hidden, ConstRows source, const int64_t* sources, MutableRows target,
                  int64_t num_rows, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
void convert_rows(DType from, DType to, int64_t hidden, ConstRows source, const int64_t* sources, MutableRows target,
                  int64_t num_rows, void* stream);
}  // namespace cuda
}  // namespace moe_opt
