// The inner loops of wire_format.h for one instruction set; see cpu_wire.cpp.
#pragma once

#include <cstdint>

#include "types.h"

namespace moe_opt {

struct WireKernels {
  // target[r] = source[sources[r]], or source[r], for the rows [begin, end); converts(from, to). `streaming`: see
  // CpuKernels; rows of 8 bits, which are soon read, are stored through the caches all the same.
  void (*convert)(DType from, DType to, int64_t hidden, ConstRows source, const int64_t* sources, MutableRows target,
                  int64_t begin, int64_t end, bool streaming);
  // target = 0 + rows[0] + rows[1] + ..., or without the zero, in float32, rounded once; sums(from, to). `target` may
  // be one of the rows where from == to.
  void (*sum)(DType from, DType to, int64_t hidden, const uint8_t* const* rows, int64_t num_rows, bool from_zero,
              uint8_t* target);
};

}  // namespace moe_opt
