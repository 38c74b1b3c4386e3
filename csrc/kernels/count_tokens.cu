// Counting the tokens of each sample and expert on CUDA. The routing is read once; a block counts a part of one sample
// in shared memory, or in registers, and adds it to the result. Integer additions: any order gives the same counts.
#include "count_tokens.h"
#include "cuda_common.cuh"

namespace moe_opt {
namespace cuda {
namespace {

constexpr int64_t kTokensPerBlock = 1024;

// Rows of the routing: token l of sample i is row i * sample_stride + l * token_stride.
struct Strides {
  int64_t sample, token;
  explicit Strides(const SampleLayout& layout)
      : sample(layout.batch_first ? layout.tokens_per_sample : 1), token(layout.batch_first ? 1 : layout.num_samples) {}
};

// One block a part of a sample's tokens (x) of a sample (y). Dynamic shared memory: counts [E].
__global__ void __launch_bounds__(kBlockThreads)
    count_topk_kernel(const int64_t* __restrict__ experts, Strides strides, int64_t num_samples,
                      int64_t tokens_per_sample, int topk, int num_experts, unsigned long long* __restrict__ num) {
  extern __shared__ unsigned int counts[];
  const int64_t first = int64_t{blockIdx.x} * kTokensPerBlock;
  const int pairs = static_cast<int>(min(kTokensPerBlock, tokens_per_sample - first)) * topk;
  for (int64_t sample = blockIdx.y; sample < num_samples; sample += gridDim.y) {
    for (int e = threadIdx.x; e < num_experts; e += kBlockThreads) counts[e] = 0;
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += kBlockThreads) {
      const int64_t row = sample * strides.sample + (first + pair / topk) * strides.token;
      const int64_t expert = __ldcs(experts + row * topk + pair % topk);
      if (expert >= 0 && expert < num_experts) atomicAdd(&counts[expert], 1u);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts; e += kBlockThreads) {
      if (counts[e] != 0) atomicAdd(&num[sample * num_experts + e], static_cast<unsigned long long>(counts[e]));
    }
    __syncthreads();
  }
}

// One thread an expert (x) of a part of the tokens (y) of a sample (z): neighbouring threads read neighbouring bytes.
__global__ void __launch_bounds__(kBlockThreads)
    count_routing_map_kernel(const uint8_t* __restrict__ routing_map, Strides strides, int64_t num_samples,
                             int64_t tokens_per_sample, int64_t num_experts, unsigned long long* __restrict__ num) {
  const int64_t expert = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (expert >= num_experts) return;
  for (int64_t sample = blockIdx.z; sample < num_samples; sample += gridDim.z) {
    for (int64_t first = int64_t{blockIdx.y} * kTokensPerBlock; first < tokens_per_sample;
         first += int64_t{gridDim.y} * kTokensPerBlock) {
      const int tokens = static_cast<int>(min(kTokensPerBlock, tokens_per_sample - first));
      const uint8_t* column = routing_map + (sample * strides.sample + first * strides.token) * num_experts + expert;
      unsigned int count = 0;
#pragma unroll 8
      for (int l = 0; l < tokens; ++l) count += column[l * strides.token * num_experts] != 0;
      if (count != 0) atomicAdd(&num[sample * num_experts + expert], static_cast<unsigned long long>(count));
    }
  }
}

// Clears the result; false if there is nothing to count.
bool begin_counting(const SampleLayout& layout, int64_t num_experts, int64_t* num, cudaStream_t stream) {
  const int64_t counts = layout.num_samples * num_experts;
  if (counts == 0) return false;
  check(cudaMemsetAsync(num, 0, counts * sizeof(int64_t), stream), "memset of counts");
  return layout.tokens_per_sample > 0;
}

// A grid dimension whose blocks walk on where there are more items than blocks.
unsigned walked(int64_t items) { return static_cast<unsigned>(std::min<int64_t>(items, 65535)); }

}  // namespace

void count_topk(const SampleLayout& layout, const int64_t* experts, int64_t topk, int64_t num_experts, int64_t* num,
                void* stream) {
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (num_experts > kMaxCountedExperts) {
    throw std::runtime_error("megatron_moe_opt: count_topk counts up to " + std::to_string(kMaxCountedExperts) +
                             " experts, not " + std::to_string(num_experts));
  }
  if (!begin_counting(layout, num_experts, num, cuda_stream) || topk == 0) return;
  const dim3 grid(grid_blocks(divide_up(layout.tokens_per_sample, kTokensPerBlock), "count_topk"),
                  walked(layout.num_samples));
  count_topk_kernel<<<grid, kBlockThreads, num_experts * sizeof(unsigned int), cuda_stream>>>(
      experts, Strides(layout), layout.num_samples, layout.tokens_per_sample, static_cast<int>(topk),
      static_cast<int>(num_experts), reinterpret_cast<unsigned long long*>(num));
  check(cudaGetLastError(), "count_topk_kernel");
}

void count_routing_map(const SampleLayout& layout, const uint8_t* routing_map, int64_t num_experts, int64_t* num,
                       void* stream) {
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (!begin_counting(layout, num_experts, num, cuda_stream)) return;
  const int threads = row_threads(num_experts, 1);
  const dim3 grid(grid_blocks(divide_up(num_experts, threads), "count_routing_map"),
                  walked(divide_up(layout.tokens_per_sample, kTokensPerBlock)), walked(layout.num_samples));
  count_routing_map_kernel<<<grid, threads, 0, cuda_stream>>>(routing_map, Strides(layout), layout.num_samples,
                                                              layout.tokens_per_sample, num_experts,
                                                              reinterpret_cast<unsigned long long*>(num));
  check(cudaGetLastError(), "count_routing_map_kernel");
}

}  // namespace cuda
}  // namespace moe_opt
