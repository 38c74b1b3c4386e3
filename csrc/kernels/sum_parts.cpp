#include "sum_parts.h"

#include <cstring>
#include <vector>

#include "cpu_dispatch.h"
#include "wire_format.h"

namespace moe_opt {
namespace cpu {

void sum_parts(DType dtype, int64_t width, const ConstRows* parts, int num_parts, MutableRows out, int64_t begin,
               int64_t end) {
  if (has_scales(dtype)) {
    std::vector<const uint8_t*> of_row(num_parts);
    for (int64_t row = begin; row < end; ++row) {
      for (int p = 0; p < num_parts; ++p) of_row[p] = parts[p].row(row);
      kernels().wire.sum(dtype, dtype, width, of_row.data(), num_parts, false, out.row(row));
    }
    return;
  }
  if (dtype != DType::kFloat64) return kernels().sum_parts(dtype, width, parts, num_parts, out, begin, end);
  const auto load = [](ConstRows rows, int64_t row, int64_t h) {
    double value;
    std::memcpy(&value, rows.row(row) + h * sizeof(value), sizeof(value));
    return value;
  };
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t h = 0; h < width; ++h) {
      double total = load(parts[0], row, h);
      for (int p = 1; p < num_parts; ++p) total += load(parts[p], row, h);
      std::memcpy(out.row(row) + h * sizeof(total), &total, sizeof(total));
    }
  }
}

}  // namespace cpu
}  // namespace moe_opt
