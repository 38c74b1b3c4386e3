// Counting the tokens of each sample and expert on CUDA. The routing is read once; a thread counts a part of one sample
// in a register and adds it to the result. Integer additions: any order gives the same counts.
#include "count_tokens.h"
#include "cuda_common.cuh"

namespace moe_opt {
namespace cuda {
namespace {

constexpr int64_t kTokensPerBlock = 1024;

// One thread an expert (x) of a part of the tokens (y) of a sample (z): neighbouring threads read neighbouring bytes.
__global__ void __launch_bounds__(kBlockThreads)
    count_routing_map_kernel(const uint8_t* __restrict__ routing_map, int64_t num_samples, int64_t tokens_per_sample,
                             int64_t num_experts, unsigned long long* __restrict__ num) {
  const int64_t expert = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (expert >= num_experts) return;
  for (int64_t sample = blockIdx.z; sample < num_samples; sample += gridDim.z) {
    for (int64_t first = int64_t{blockIdx.y} * kTokensPerBlock; first < tokens_per_sample;
         first += int64_t{gridDim.y} * kTokensPerBlock) {
      const int tokens = static_cast<int>(min(kTokensPerBlock, tokens_per_sample - first));
      const uint8_t* column = routing_map + (first * num_samples + sample) * num_experts + expert;
      unsigned int count = 0;
#pragma unroll 8
      for (int l = 0; l < tokens; ++l) count += column[l * num_samples * num_experts] != 0;
      if (count != 0) atomicAdd(&num[sample * num_experts + expert], static_cast<unsigned long long>(count));
    }
  }
}

// A grid dimension whose blocks walk on where there are more items than blocks.
unsigned walked(int64_t items) { return static_cast<unsigned>(std::min<int64_t>(items, 65535)); }

}  // namespace

void count_routing_map(const SampleLayout& layout, const uint8_t* routing_map, int64_t num_experts, int64_t* num,
                       void* stream) {
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  const int64_t counts = layout.num_samples * num_experts;
  if (counts == 0) return;
  check(cudaMemsetAsync(num, 0, counts * sizeof(int64_t), cuda_stream), "memset of counts");
  if (layout.tokens_per_sample == 0) return;
  const int threads = row_threads(num_experts, 1);
  const dim3 grid(grid_blocks(divide_up(num_experts, threads), "count_routing_map"),
                  walked(divide_up(layout.tokens_per_sample, kTokensPerBlock)), walked(layout.num_samples));
  count_routing_map_kernel<<<grid, threads, 0, cuda_stream>>>(routing_map, layout.num_samples, layout.tokens_per_sample,
                                                              num_experts, reinterpret_cast<unsigned long long*>(num));
  check(cudaGetLastError(), "count_routing_map_kernel");
}

}  // namespace cuda
}  // namespace moe_opt
