// Element types and row views shared by every kernel. No framework headers.
#pragma once

#include <cstdint>

namespace moe_opt {

// kFloat64 is for sums of probabilities alone.
enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

constexpr int64_t element_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// Rows of a matrix in memory: element (r, h) is at data + r * stride_bytes + h * element size.
struct ConstRows {
  const void* data;
  int64_t stride_bytes;
};
struct MutableRows {
  void* data;
  int64_t stride_bytes;
};

}  // namespace moe_opt
