// num[i, e]: how many tokens of sample i are routed to expert e. What the placement of samples is decided on.
//
// Shapes: I samples of L tokens, E experts, K experts of a token. Token l of sample i is row l * I + i of the routing
// (sequence first, as Megatron-Core lays tokens out) or row i * L + l (batch first).
#pragma once

#include <cstdint>

namespace moe_opt {

struct SampleLayout {
  int64_t num_samples;        // I
  int64_t tokens_per_sample;  // L
  bool batch_first;
};

namespace cpu {

// Both count for the samples [begin, end), whose rows of num ([I, E]) they overwrite; the caller splits [0, I) over
// threads.

// experts: [I * L, K]. L * K < 2^32. False if an expert is outside [0, E); the counts then mean nothing.
bool count_topk(const SampleLayout& layout, const int64_t* experts, int64_t topk, int64_t num_experts, int64_t* num,
                int64_t begin, int64_t end);

// routing_map: [I * L, E] bytes, nonzero = routed.
void count_routing_map(const SampleLayout& layout, const uint8_t* routing_map, int64_t num_experts, int64_t* num,
                       int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

// The same for all samples, on a stream. Experts outside [0, E) are not counted. E is bounded by the counts that fit a
// block's shared memory in count_topk: kMaxCountedExperts.
constexpr int64_t kMaxCountedExperts = 12 * 1024;
void count_topk(const SampleLayout& layout, const int64_t* experts, int64_t topk, int64_t num_experts, int64_t* num,
                void* stream);
void count_routing_map(const SampleLayout& layout, const uint8_t* routing_map, int64_t num_experts, int64_t* num,
                       void* stream);

}  // namespace cuda
}  // namespace moe_opt
