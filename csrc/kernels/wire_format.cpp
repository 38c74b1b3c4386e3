#include "wire_format.h"

#include "cpu_dispatch.h"

namespace moe_opt {
namespace cpu {

void convert_rows(DType from, DType to, int64_t hidden, ConstRows source, const int64_t* sources, MutableRows target,
                  int64_t num_rows, int64_t begin, int64_t end) {
  kernels().wire.convert(from, to, hidden, source, sources, target, begin, end,
                         should_stream(num_rows * payload_bytes(to, hidden)));
}

}  // namespace cpu
}  // namespace moe_opt
