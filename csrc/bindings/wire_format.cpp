#include "bindings/wire_format.h"

#include "bindings/module.h"

namespace moe_opt {

ScalarType wire_dtype(ScalarType rows, const std::string& wire) {
  if (wire == "same") return rows;
  return wire == "bf16" ? ScalarType::BFloat16 : ScalarType::Byte;
}

DType wire_format(ScalarType dtype, const std::string& wire, const char* name) {
  if (wire == "same") return kernel_dtype(dtype, name);
  check(wire == "bf16" || wire == "fp8" || wire == "mxfp8", name, ": unknown wire format '", wire,
        "': use same, bf16, fp8 or mxfp8");
  check(dtype == wire_dtype(dtype, wire), name, " is ", dtype, ", but rows in ", wire, " are ",
        wire_dtype(dtype, wire));
  return wire == "bf16" ? DType::kBFloat16 : wire == "fp8" ? DType::kFp8 : DType::kMxfp8;
}

DType check_wire_rows(const Argument& rows, const std::string& wire, int64_t hidden, std::optional<int64_t> num_rows,
                      const at::Device& device) {
  check_tensor(rows, 2, device);
  const DType format = wire_format(rows.scalar_type(), wire, rows.name);
  check(!num_rows || rows.size(0) == *num_rows, rows.name, " has ", rows.size(0), " rows, not ", num_rows.value_or(0));
  check(payload_bytes(format, hidden) <= rows.size(1) * rows.element_size(), hidden, " elements in ", wire,
        " do not fit ", rows.name, " of shape ", rows.sizes());
  return format;
}

namespace {

// target [N, >= payload] from source [R, >= payload], or from its rows `sources` [N].
void convert_rows(const Input<"source">& source, const std::string& source_wire, Size<"hidden"> hidden,
                  const OptionalInput<"sources">& sources, const std::string& target_wire,
                  const Buffer<"target">& target) {
  const at::Device device = source.device();
  const int64_t num_rows = sources ? sources->numel() : source.size(0);
  const DType from = check_wire_rows(source, source_wire, hidden, std::nullopt, device);
  const DType to = check_wire_rows(target, target_wire, hidden, num_rows, device);
  check(converts(from, to), "convert_rows: no conversion of rows in ", source_wire, " (", source.scalar_type(),
        ") to rows in ", target_wire, " (", target.scalar_type(), ")");
  check(!overlap(source, target), "convert_rows: source and target share memory");
  const int64_t* rows = nullptr;
  if (sources) {
    check_index(*sources, device);
    rows = sources->const_data_ptr<int64_t>();
    bool inside = true;  // on CUDA the caller's to know, as looking would stop the host
    for (int64_t r = 0; r < num_rows && device.is_cpu(); ++r) inside &= rows[r] >= 0 && rows[r] < source.size(0);
    check(inside, "convert_rows: a source is outside [0, ", source.size(0), ")");
  }
  MOE_OPT_IF_CUDA(source, cuda::convert_rows(from, to, hidden, const_rows(source), rows, mutable_rows(target), num_rows,
                                             call.stream)) {
    for_row_ranges(num_rows, payload_bytes(from, hidden), [&](int64_t begin, int64_t end) {
      cpu::convert_rows(from, to, hidden, const_rows(source), rows, mutable_rows(target), num_rows, begin, end);
    });
  }
}

}  // namespace

void bind_wire_format(py::module_& m) { define(m, "convert_rows", convert_rows, NoGil()); }

}  // namespace moe_opt
