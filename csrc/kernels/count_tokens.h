// num[i, e]: how many tokens of sample i are routed to expert e. What the placement of samples is decided on.
//
// Shapes: I samples of L tokens, E experts. Token l of sample i is row l * I + i of the routing map, as Megatron-Core
// lays tokens out. routing_map: [I * L, E] bytes, nonzero = routed. GPUs use PyTorch's sum.
#pragma once

#include <cstdint>

namespace moe_opt {

struct SampleLayout {
  int64_t num_samples;        // I
  int64_t tokens_per_sample;  // L
};

namespace cpu {

// Counts for the samples [begin, end), whose rows of num ([I, E]) it overwrites; the caller splits [0, I) over threads.
void count_routing_map(const SampleLayout& layout, const uint8_t* routing_map, int64_t num_experts, int64_t* num,
                       int64_t begin, int64_t end);

}  // namespace cpu
}  // namespace moe_opt
