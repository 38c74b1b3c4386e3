// The Python module megatron_moe_opt._C: checks that arguments (arguments.h) fit together, turns them into pointers,
// and calls the kernels, on CPU split over PyTorch's threads, on CUDA on the current stream. Users call the faces in
// megatron_moe_opt/kernels.
#include "bindings/module.h"

#include <string>
#include <vector>

#include "bindings/tensors.h"
#include "kernels/cpu_dispatch.h"
#include "kernels/host_pool.h"
#include "pipeline/uncaught_exception.h"

namespace moe_opt {
namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = MOE_OPT_VERSION;
  info["abi"] = MOE_OPT_ABI;
  info["torch"] = MOE_OPT_TORCH_VERSION;
  info["compiler"] = MOE_OPT_COMPILER;
#ifdef MOE_OPT_CUDA
  info["backend"] = "cuda";
#else
  info["backend"] = "cpu";
#endif
  info["cuda_archs"] = MOE_OPT_CUDA_ARCHS;
  info["cpu_kernels"] = cpu::kernels().name;
  return info;
}

py::dict host_pool_stats() {
  const HostPoolStats stats = host_pool::stats();
  py::dict out;
  out["used_bytes"] = stats.used_bytes;
  out["cached_bytes"] = stats.cached_bytes;
  out["hits"] = stats.hits;
  out["misses"] = stats.misses;
  return out;
}

}  // namespace
}  // namespace moe_opt

PYBIND11_MODULE(_C, m) {
  using namespace moe_opt;  // NOLINT
  define(m, "empty", [](const std::vector<Size<"a size">>& shape, ScalarType dtype, at::Device device) {
    return empty(std::vector<int64_t>(shape.begin(), shape.end()), dtype, device);
  });
  bind_row_map(m);
  bind_permute(m);
  bind_chunk_copy(m);
  bind_wire_format(m);
  bind_residual_codec(m);
  bind_placement(m);
  bind_exchange_plan(m);
  bind_hop_plan(m);
  bind_actions(m);
  bind_executor(m);
  define(m, "build_info", build_info);
  define(m, "select_cpu_kernels", [](const std::string& name) { return cpu::select_kernels(name.c_str()); });
  define(m, "keep_uncaught_exceptions", keep_uncaught_exceptions);
  define(m, "uncaught_exception", uncaught_exception);
  define(m, "let_end", let_end);
  define(m, "host_pool_stats", host_pool_stats);
}
