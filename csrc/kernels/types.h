// Element types and row views shared by every kernel. No framework headers.
#pragma once

#include <cstdint>

namespace moe_opt {

// What the elements of a row are. kFloat64 is for sums of probabilities alone; kFp8 and kMxfp8 are the codes of rows on
// the wire, with scales behind them: see wire_format.h.
enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3, kFp8 = 4, kMxfp8 = 5 };

constexpr int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    case DType::kFp8:
    case DType::kMxfp8:
      return 1;
    default:
      return 2;
  }
}

// Rows of a matrix in memory: element (r, h) is at data + r * stride_bytes + h * element size.
struct ConstRows {
  const void* data;
  int64_t stride_bytes;
  const uint8_t* row(int64_t index) const { return static_cast<const uint8_t*>(data) + index * stride_bytes; }
};
struct MutableRows {
  void* data;
  int64_t stride_bytes;
  uint8_t* row(int64_t index) const { return static_cast<uint8_t*>(data) + index * stride_bytes; }
};

}  // namespace moe_opt
