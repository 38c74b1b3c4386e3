// Bulk stores of sm_90 and newer: at one instruction of a thread the TMA unit writes a stretch of shared memory to
// global memory, and takes care of whole lines. (PTX ISA, cp.async.bulk.)
//
//   every thread writes its part of the shared memory;  bulk_publish();  __syncthreads();
//   some threads: bulk_store(...) any number of times; then all: bulk_wait()
#pragma once

#include "cuda_common.cuh"

namespace moe_opt {
namespace cuda {

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDACC_VER_MAJOR__ < 12)  // 11.8 knows sm_90, not its copies
constexpr bool kBulkStores = false;
#else
constexpr bool kBulkStores = true;
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 12
// Shows what this thread has written to shared memory to the TMA unit.
__device__ __forceinline__ void bulk_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "r"(bytes)
               : "memory");
}
// Waits until the stores of this thread have read shared memory; they have arrived when the kernel ends.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
#else
// What they do, for the emulator of the tests; on older devices no kernel calls them.
__device__ __forceinline__ void bulk_publish() {}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, unsigned bytes) {
  for (unsigned unit = 0; unit < bytes / sizeof(uint4); ++unit) {
    static_cast<uint4*>(global)[unit] = static_cast<const uint4*>(shared)[unit];
  }
}
__device__ __forceinline__ void bulk_wait() {}
#endif

}  // namespace cuda
}  // namespace moe_opt
