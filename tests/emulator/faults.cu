// Kernels with one fault each, and next to each the same without it: what the emulator is there to tell apart.
#include <cuda_runtime.h>

#include <map>
#include <stdexcept>
#include <string>

namespace {

constexpr int kThreads = 64;
constexpr unsigned kAll = 0xffffffffu;

__global__ void __launch_bounds__(kThreads) past_the_end(int* data, int wrong) {
  data[blockIdx.x * kThreads + threadIdx.x + wrong] = 1;
}
__global__ void __launch_bounds__(kThreads) unwritten(int* data, int* out, int wrong) {
  if (!wrong) data[threadIdx.x] = 1;
  out[threadIdx.x] = data[threadIdx.x];
}
__global__ void __launch_bounds__(kThreads) unwritten_shared(int* out, int wrong) {
  __shared__ int row[kThreads];
  if (!wrong) row[threadIdx.x] = 1;  // the values of the block before, and of another kernel, are nobody's
  out[blockIdx.x * kThreads + threadIdx.x] = row[threadIdx.x];
}
__global__ void __launch_bounds__(kThreads) crooked(char* data, int wrong) {
  __stcs(reinterpret_cast<uint4*>(data + wrong) + threadIdx.x, uint4{1, 2, 3, 4});
}
__global__ void __launch_bounds__(kThreads) no_barrier(int* out, int wrong) {
  __shared__ int row[kThreads];
  row[threadIdx.x] = 1;
  if (!wrong) __syncthreads();
  out[threadIdx.x] = row[(threadIdx.x + 1) % kThreads];
}
__global__ void __launch_bounds__(kThreads) no_barrier_before_reuse(int* out, int wrong) {
  __shared__ int row[kThreads];
  row[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = row[(threadIdx.x + 1) % kThreads];
  if (!wrong) __syncthreads();
  row[threadIdx.x] = 2;
}
__global__ void __launch_bounds__(kThreads) blocks_write_one_place(int* data, int wrong) {
  data[wrong ? threadIdx.x : blockIdx.x * kThreads + threadIdx.x] = 1;
}
__global__ void __launch_bounds__(kThreads) block_reads_what_another_writes(int* data, int wrong) {
  const int other = wrong ? (blockIdx.x + 1) % gridDim.x : blockIdx.x;
  data[blockIdx.x * kThreads + threadIdx.x] = 1;
  __syncthreads();
  if (data[other * kThreads + (threadIdx.x + 1) % kThreads] == 7) data[0] = 7;
}
__global__ void __launch_bounds__(kThreads) plain_sum(unsigned int* sum, int wrong) {
  if (wrong) {
    *sum = *sum + 1;
  } else {
    atomicAdd(sum, 1u);
  }
}
__global__ void __launch_bounds__(kThreads) missing_lane(int* out, int wrong) {
  if (wrong && threadIdx.x == 5) return;
  out[threadIdx.x] = static_cast<int>(__ballot_sync(kAll, true));
}
__global__ void __launch_bounds__(kThreads) two_barriers(int* out, int wrong) {
  if (wrong && threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}
__global__ void __launch_bounds__(kThreads) two_collectives(int* out, int wrong) {
  int value = threadIdx.x;
  if (wrong && threadIdx.x % 2) {
    value = __shfl_xor_sync(kAll, value, 1);
  } else {
    value = __shfl_xor_sync(kAll, value, 2);
  }
  out[threadIdx.x] = value;
}

struct Device {
  explicit Device(size_t bytes, bool filled = true) : bytes(bytes), data(emulator::allocate(bytes)) {
    if (filled) cudaMemsetAsync(data, 0, bytes);
  }
  ~Device() { emulator::release(data); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
  size_t bytes;
  void* data;
};

void run(const std::string& name, int wrong) {
  const Device full(2 * kThreads * sizeof(int)), out(2 * kThreads * sizeof(int), false);
  const Device empty(kThreads * sizeof(int), false), wide(kThreads * 16 + 16);
  int on_host[kThreads] = {};
  const cudaStream_t stream = nullptr;
  if (name == "past_the_end") past_the_end<<<2, kThreads, 0, stream>>>(full.as<int>(), wrong);
  if (name == "unwritten") unwritten<<<1, kThreads, 0, stream>>>(empty.as<int>(), out.as<int>(), wrong);
  if (name == "unwritten_shared") unwritten_shared<<<2, kThreads, 0, stream>>>(out.as<int>(), wrong);
  if (name == "crooked") crooked<<<1, kThreads, 0, stream>>>(wide.as<char>(), wrong);
  if (name == "no_barrier") no_barrier<<<1, kThreads, 0, stream>>>(out.as<int>(), wrong);
  if (name == "no_barrier_before_reuse") no_barrier_before_reuse<<<1, kThreads, 0, stream>>>(out.as<int>(), wrong);
  if (name == "blocks_write_one_place") blocks_write_one_place<<<2, kThreads, 0, stream>>>(full.as<int>(), wrong);
  if (name == "block_reads_what_another_writes") {
    block_reads_what_another_writes<<<2, kThreads, 0, stream>>>(full.as<int>(), wrong);
  }
  if (name == "plain_sum") plain_sum<<<2, kThreads, 0, stream>>>(full.as<unsigned int>(), wrong);
  if (name == "missing_lane") missing_lane<<<1, kThreads, 0, stream>>>(out.as<int>(), wrong);
  if (name == "two_barriers") two_barriers<<<1, kThreads, 0, stream>>>(out.as<int>(), wrong);
  if (name == "two_collectives") two_collectives<<<1, kThreads, 0, stream>>>(out.as<int>(), wrong);
  if (name == "host_memory") past_the_end<<<1, kThreads, 0, stream>>>(wrong ? on_host : full.as<int>(), 0);
  if (name == "freed") {
    Device* const freed = new Device(kThreads * sizeof(int));
    int* const data = freed->as<int>();
    if (wrong) delete freed;
    past_the_end<<<1, kThreads, 0, stream>>>(data, 0);
    if (!wrong) delete freed;
  }
}

}  // namespace

// What the emulator says of a kernel: nothing where it is right.
extern "C" const char* emulator_fault(const char* name, int wrong) {
  static std::string said;
  said.clear();
  try {
    run(name, wrong);
  } catch (const std::runtime_error& error) {
    said = error.what();
  }
  return said.c_str();
}
