// Element types and row views shared by every kernel. No framework headers.
#pragma once

#include <cstdint>

namespace moe_opt {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace moe_opt
