// NetMoE's placement of samples in two stages (eqs. 5-10 of the paper): samples to nodes with the fewest tokens between
// nodes, then, inside each node, samples to devices with the fewest tokens between its devices.
#pragma once

#include <cstdint>
#include <vector>

namespace moe_opt {
namespace assignment {

// Shapes: I samples, E experts, J devices, N nodes.
struct Cluster {
  int64_t num_experts, num_devices, num_nodes;
  const int64_t* expert_device;    // [E]
  const int64_t* device_node;      // [J]
  const int64_t* device_capacity;  // [J], samples; together at least I
};

// Tokens: int64_t or double. The tokens of a sample that are not local cost; since their number is the sample's total
// less the local ones, the negative number of local tokens stands for eq. 8's c and c' here.
template <typename Tokens>
class SamplePlacement {
 public:
  // num: [I, E], tokens of each sample for each expert. Solves the first stage. Throws std::invalid_argument for
  // indices out of range, too little capacity, counts that are not finite or of which an absolute value exceeds 2^40.
  SamplePlacement(const Tokens* num, int64_t num_samples, const Cluster& cluster);

  // Solves the second stage of one node: writes device_of[i] of the samples on it. Different nodes may be solved at the
  // same time.
  void place_on_devices(int64_t node, int64_t* device_of) const;

 private:
  const Cluster cluster_;
  std::vector<std::vector<int64_t>> devices_of_;  // of each node
  std::vector<Tokens> local_;                     // [I, J], tokens of a sample for the experts on a device
  std::vector<std::vector<int64_t>> samples_of_;  // of each node, ascending
};

extern template class SamplePlacement<int64_t>;
extern template class SamplePlacement<double>;

}  // namespace assignment
}  // namespace moe_opt
