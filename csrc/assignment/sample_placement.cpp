#include "sample_placement.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "transportation.h"

namespace moe_opt {
namespace assignment {
namespace {

void check_groups(const int64_t* group_of, int64_t count, int64_t num_groups, const char* name, const char* groups) {
  for (int64_t k = 0; k < count; ++k) {
    if (group_of[k] >= 0 && group_of[k] < num_groups) continue;
    throw std::invalid_argument(std::string(name) + "[" + std::to_string(k) + "] is " + std::to_string(group_of[k]) +
                                ", outside [0, " + std::to_string(num_groups) + "), the number of " + groups);
  }
}

// Sums of counts stay far inside an int64.
void check_counts(const int64_t* num, int64_t count) {
  uint64_t magnitude = 0;
  for (int64_t k = 0; k < count; ++k) magnitude |= static_cast<uint64_t>(num[k] ^ (num[k] >> 63));
  if (magnitude >> 40 != 0) throw std::invalid_argument("num holds a count of 2^40 tokens or more");
}
void check_counts(const double* num, int64_t count) {
  bool finite = true;
  for (int64_t k = 0; k < count; ++k) finite &= std::isfinite(num[k]);
  if (!finite) throw std::invalid_argument("num holds a count that is not finite");
}

void check_capacity(const Cluster& cluster) {
  for (int64_t j = 0; j < cluster.num_devices; ++j) {
    if (cluster.device_capacity[j] < 0) {
      throw std::invalid_argument("capacity[" + std::to_string(j) +
                                  "] is negative: " + std::to_string(cluster.device_capacity[j]));
    }
  }
}

}  // namespace

template <typename Tokens>
SamplePlacement<Tokens>::SamplePlacement(const Tokens* num, int64_t num_samples, const Cluster& cluster)
    : cluster_(cluster),
      devices_of_(cluster.num_nodes),
      local_(num_samples * cluster.num_devices),
      samples_of_(cluster.num_nodes) {
  check_groups(cluster.expert_device, cluster.num_experts, cluster.num_devices, "expert_device", "devices");
  check_groups(cluster.device_node, cluster.num_devices, cluster.num_nodes, "device_node", "nodes");
  check_capacity(cluster);
  check_counts(num, num_samples * cluster.num_experts);

  std::vector<int64_t> capacity(cluster.num_nodes, 0), node_of(num_samples);
  for (int64_t j = 0; j < cluster.num_devices; ++j) {
    devices_of_[cluster.device_node[j]].push_back(j);
    capacity[cluster.device_node[j]] += std::min(cluster.device_capacity[j], num_samples);
  }
  std::vector<Tokens> cost(num_samples * cluster.num_nodes);
  for (int64_t i = 0; i < num_samples; ++i) {
    const Tokens* tokens = num + i * cluster.num_experts;
    Tokens* local = local_.data() + i * cluster.num_devices;
    for (int64_t e = 0; e < cluster.num_experts; ++e) local[cluster.expert_device[e]] += tokens[e];
    Tokens* cost_of_node = cost.data() + i * cluster.num_nodes;
    for (int64_t j = 0; j < cluster.num_devices; ++j) cost_of_node[cluster.device_node[j]] -= local[j];
  }
  place(cost.data(), num_samples, cluster.num_nodes, capacity.data(), node_of.data());
  for (int64_t i = 0; i < num_samples; ++i) samples_of_[node_of[i]].push_back(i);
}

template <typename Tokens>
void SamplePlacement<Tokens>::place_on_devices(int64_t node, int64_t* device_of) const {
  const std::vector<int64_t>& devices = devices_of_[node];
  const std::vector<int64_t>& samples = samples_of_[node];
  std::vector<Tokens> cost;
  cost.reserve(samples.size() * devices.size());
  for (const int64_t i : samples) {
    for (const int64_t j : devices) cost.push_back(-local_[i * cluster_.num_devices + j]);
  }
  std::vector<int64_t> capacity, placed(samples.size());
  for (const int64_t j : devices) capacity.push_back(cluster_.device_capacity[j]);
  place(cost.data(), static_cast<int64_t>(samples.size()), static_cast<int64_t>(devices.size()), capacity.data(),
        placed.data());
  for (size_t k = 0; k < samples.size(); ++k) device_of[samples[k]] = devices[placed[k]];
}

template class SamplePlacement<int64_t>;
template class SamplePlacement<double>;

}  // namespace assignment
}  // namespace moe_opt
