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
  constexpr uint64_t kLimit = uint64_t{1} << 40;
  uint64_t bits = 0;  // of unsigned numbers that are small where all is well
  for (int64_t k = 0; k < count; ++k) bits |= static_cast<uint64_t>(num[k]) + kLimit;
  if (bits >= 2 * kLimit) throw std::invalid_argument("num holds a count of 2^40 tokens or more");
}
void check_counts(const double* num, int64_t count) {
  bool finite = true;
  for (int64_t k = 0; k < count; ++k) finite &= std::isfinite(num[k]);
  if (!finite) throw std::invalid_argument("num holds a count that is not finite");
}

// Sums over the members of groups: of a sample's tokens by device, of those by node.
class GroupSums {
 public:
  GroupSums(const int64_t* group_of, int64_t count, int64_t num_groups)
      : num_groups_(num_groups), begin_(num_groups + 1, 0), member_(count) {
    for (int64_t k = 0; k < count; ++k) ++begin_[group_of[k] + 1];
    for (int64_t g = 0; g < num_groups; ++g) begin_[g + 1] += begin_[g];
    std::vector<int64_t> next(begin_.begin(), begin_.end() - 1);
    for (int64_t k = 0; k < count; ++k) member_[next[group_of[k]]++] = k;
    const int64_t size = count / std::max<int64_t>(1, num_groups);
    bool in_turn = size * num_groups == count;
    for (int64_t k = 0; k < count && in_turn; ++k) in_turn = group_of[k] == k / size;
    equal_size_ = in_turn ? size : 0;
  }

  // sums[g] = sum of values[k] over the members k of group g.
  template <typename Value>
  void operator()(const Value* values, Value* sums) const {
    switch (equal_size_) {  // stock's order of experts, a device's behind each other; the usual numbers unrolled
      case 1:
        return sum_in_turn<1>(values, sums);
      case 2:
        return sum_in_turn<2>(values, sums);
      case 4:
        return sum_in_turn<4>(values, sums);
      case 8:
        return sum_in_turn<8>(values, sums);
      default:
        break;
    }
    // A sum in a register: sums[group_of[k]] += values[k] would wait for the last addition to have reached memory.
    for (int64_t g = 0; g < num_groups_; ++g) {
      Value sum = 0;
      for (int64_t k = begin_[g]; k < begin_[g + 1]; ++k) sum += values[member_[k]];
      sums[g] = sum;
    }
  }

 private:
  template <int64_t kSize, typename Value>
  void sum_in_turn(const Value* values, Value* sums) const {
    for (int64_t g = 0; g < num_groups_; ++g) {
      Value sum = 0;
      for (int64_t k = 0; k < kSize; ++k) sum += values[g * kSize + k];
      sums[g] = sum;
    }
  }

  int64_t num_groups_;
  std::vector<int64_t> begin_, member_;  // the members of group g are at [begin_[g], begin_[g + 1])
  int64_t equal_size_;                   // of groups that are equal and in turn, else 0
};

}  // namespace

template <typename Tokens>
SamplePlacement<Tokens>::SamplePlacement(const Tokens* num, int64_t num_samples, const Cluster& cluster)
    : cluster_(cluster),
      devices_of_(cluster.num_nodes),
      local_(num_samples * cluster.num_devices),
      samples_of_(cluster.num_nodes) {
  check_groups(cluster.expert_device, cluster.num_experts, cluster.num_devices, "expert_device", "devices");
  check_groups(cluster.device_node, cluster.num_devices, cluster.num_nodes, "device_node", "nodes");

  const std::vector<int64_t> usable = usable_capacity(cluster.device_capacity, num_samples, cluster.num_devices);
  std::vector<int64_t> capacity(cluster.num_nodes, 0), node_of(num_samples);
  for (int64_t j = 0; j < cluster.num_devices; ++j) {
    devices_of_[cluster.device_node[j]].push_back(j);
    capacity[cluster.device_node[j]] += usable[j];
  }
  const GroupSums sum_by_device(cluster.expert_device, cluster.num_experts, cluster.num_devices);
  const GroupSums sum_by_node(cluster.device_node, cluster.num_devices, cluster.num_nodes);
  std::vector<Tokens> cost(num_samples * cluster.num_nodes);
  for (int64_t i = 0; i < num_samples; ++i) {
    Tokens* local = local_.data() + i * cluster.num_devices;
    const Tokens* tokens = num + i * cluster.num_experts;
    check_counts(tokens, cluster.num_experts);
    sum_by_device(tokens, local);
    Tokens* cost_of_node = cost.data() + i * cluster.num_nodes;
    sum_by_node(local, cost_of_node);
    for (int64_t n = 0; n < cluster.num_nodes; ++n) cost_of_node[n] = -cost_of_node[n];
  }
  place(cost.data(), num_samples, cluster.num_nodes, capacity.data(), node_of.data());
  for (int64_t n = 0; n < cluster.num_nodes; ++n) samples_of_[n].reserve(std::min(capacity[n], num_samples));
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
