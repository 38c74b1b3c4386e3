#include <algorithm>
#include <vector>

#include "assignment/sample_placement.h"
#include "assignment/transportation.h"
#include "bindings/module.h"
#include "bindings/row_map.h"
#include "kernels/count_tokens.h"

namespace moe_opt {
namespace {

// num [I, E] from routing_map [I * L, E].
Tensor count_routing_map(const Input<"routing_map">& routing_map, Size<"num_samples"> num_samples) {
  check_routing_map(routing_map);
  check(routing_map.is_cpu(), "routing_map must be on the CPU, but is on ", routing_map.device());
  const int64_t num_tokens = routing_map.size(0), num_experts = routing_map.size(1);
  check(num_samples > 0 && num_tokens % num_samples == 0, "routing_map of shape ", routing_map.sizes(),
        " cannot be cut into ", num_samples, " samples of equal length");
  const SampleLayout layout{num_samples, num_tokens / num_samples};
  Tensor num = empty_like({num_samples, num_experts}, ScalarType::Long, routing_map);
  if (num.numel() == 0 || routing_map.numel() == 0) return num.zero_();  // however many rows of nothing there are
  const auto* bytes = static_cast<const uint8_t*>(routing_map.const_data_ptr());
  int64_t* out = num.mutable_data_ptr<int64_t>();
  for_row_ranges(layout.num_samples, layout.tokens_per_sample * num_experts, [&](int64_t begin, int64_t end) {
    cpu::count_routing_map(layout, bytes, num_experts, out, begin, end);
  });
  return num;
}

// Calls solve(values) with costs or counts as int64_t or double.
template <typename Solve>
void with_numbers(const Argument& tensor, const Solve& solve) {
  check_tensor(tensor, 2, at::kCPU);
  if (tensor.scalar_type() == ScalarType::Long) return solve(tensor.const_data_ptr<int64_t>());
  check(tensor.scalar_type() == ScalarType::Double, tensor.name, " must be int64 or float64, but is ",
        tensor.scalar_type());
  solve(tensor.const_data_ptr<double>());
}

// The sink of each sample: [I] from cost [I, N] and capacity [N].
Tensor solve_placement(const Input<"cost">& cost, const Input<"capacity">& capacity) {
  check_index(capacity, at::kCPU);
  Tensor sink_of;
  with_numbers(cost, [&](const auto* values) {
    sink_of = empty_like({cost.size(0)}, ScalarType::Long, cost);
    check(capacity.numel() == cost.size(1), "capacity has ", capacity.numel(), " entries, but cost of shape ",
          cost.sizes(), " has ", cost.size(1), " sinks");
    assignment::place(values, cost.size(0), cost.size(1), capacity.const_data_ptr<int64_t>(),
                      sink_of.mutable_data_ptr<int64_t>());
  });
  return sink_of;
}

// The device of each sample: [I] from num [I, E], expert_device [E], device_node [J] and capacity [J], or as many on
// each.
Tensor place_samples(const Input<"num">& num, const Input<"expert_device">& expert_device,
                     const Input<"device_node">& device_node, const OptionalInput<"capacity">& capacity) {
  constexpr int64_t kCostsPerTask = 16 * 1024;  // of a second-stage problem that is worth a thread
  check_index(expert_device, at::kCPU);
  check_index(device_node, at::kCPU);
  Tensor device_of;
  with_numbers(num, [&](const auto* values) {
    const int64_t num_samples = num.size(0), num_experts = num.size(1), num_devices = device_node.numel();
    check(expert_device.numel() == num_experts, "expert_device has ", expert_device.numel(),
          " entries, but num of shape ", num.sizes(), " has ", num_experts, " experts");
    std::vector<int64_t> equal;
    if (capacity) {
      check_index(*capacity, at::kCPU);
      check(capacity->numel() == num_devices, "capacity has ", capacity->numel(), " entries, but device_node has ",
            num_devices);
    } else {
      check(num_devices > 0 && num_samples % num_devices == 0, num_samples, " samples do not divide among ",
            num_devices, " devices: pass their capacity");
      equal.assign(num_devices, num_samples / num_devices);
    }
    const int64_t* node_of = device_node.const_data_ptr<int64_t>();
    const int64_t last_node = num_devices > 0 ? *std::max_element(node_of, node_of + num_devices) : -1;
    check(-1 <= last_node && last_node < num_devices, "device_node holds node ", last_node, ", but there are only ",
          num_devices, " devices: count the nodes from 0");
    const int64_t num_nodes = last_node + 1;
    check(num_samples <= INT32_MAX, "num of shape ", num.sizes(), " has more than 2^31 - 1 samples");
    const assignment::Cluster cluster{num_experts, num_devices,
                                      num_nodes,   expert_device.const_data_ptr<int64_t>(),
                                      node_of,     capacity ? capacity->const_data_ptr<int64_t>() : equal.data()};
    const assignment::SamplePlacement placement(values, num_samples, cluster);
    device_of = empty_like({num_samples}, ScalarType::Long, num);
    const int64_t node_costs = num_samples * num_devices / std::max<int64_t>(1, num_nodes * num_nodes);
    const int64_t grain = kCostsPerTask / std::max<int64_t>(1, node_costs) + 1;
    at::parallel_for(0, num_nodes, grain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) placement.place_on_devices(n, device_of.mutable_data_ptr<int64_t>());
    });
  });
  return device_of;
}

}  // namespace

void bind_placement(py::module_& m) {
  define(m, "count_routing_map", count_routing_map, NoGil());
  define(m, "solve_placement", solve_placement, NoGil());
  define(m, "place_samples", place_samples, NoGil());
}

}  // namespace moe_opt
