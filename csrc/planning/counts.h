// Numbers that ranks have told each other.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace moe_opt::planning {

// `rows`, which every number that a plan is made of goes through: sums of many stay in range then.
inline int64_t checked(int64_t rows, int64_t most) {
  if (rows < 0 || rows > most) throw std::invalid_argument("counts holds what is no number of rows");
  return rows;
}

}  // namespace moe_opt::planning
