// Rows in a wire format as arguments: a tensor, and a word of megatron_moe_opt/row_format.py.
#pragma once

#include <optional>
#include <string>

#include "bindings/tensors.h"
#include "kernels/wire_format.h"

namespace moe_opt {

// The dtype of the tensor that holds rows on the wire, which are of dtype `rows` elsewhere.
ScalarType wire_dtype(ScalarType rows, const std::string& wire);

// The format of rows in a tensor of `dtype`: "same" is the dtype itself.
DType wire_format(ScalarType dtype, const std::string& wire, const char* name);

// The format of a matrix on the device, whose rows hold the payload of `hidden` elements. With num_rows, that many.
DType check_wire_rows(const Argument& rows, const std::string& wire, int64_t hidden, std::optional<int64_t> num_rows,
                      const at::Device& device);

}  // namespace moe_opt
