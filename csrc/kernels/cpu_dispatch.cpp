#include "cpu_dispatch.h"

#include <unistd.h>

#include <atomic>
#include <cstring>

#ifdef MOE_OPT_X86
#include <cpuid.h>
#endif

namespace moe_opt {
namespace cpu {
namespace {

#ifdef MOE_OPT_X86
// __builtin_cpu_supports("f16c") is an error to GCC before 11 and to clang before 18.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

const CpuKernels* find_kernels(const char* name) {
  const bool best = std::strcmp(name, "best") == 0;
#ifdef MOE_OPT_X86
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && (best || std::strcmp(name, "avx512") == 0)) return &avx512::kernels;
  if (has_avx2 && (best || std::strcmp(name, "avx2") == 0)) return &avx2::kernels;
#endif
  if (best || std::strcmp(name, "generic") == 0) return &generic::kernels;
  return nullptr;
}

std::atomic<const CpuKernels*>& selected() {
  static std::atomic<const CpuKernels*> chosen{find_kernels("best")};
  return chosen;
}

int64_t last_level_cache_bytes() {
  constexpr int64_t kUnknown = 32 << 20;
#ifdef _SC_LEVEL3_CACHE_SIZE
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? bytes : kUnknown;
#else
  return kUnknown;
#endif
}

std::atomic<int64_t>& stream_threshold() {
  static std::atomic<int64_t> threshold{last_level_cache_bytes()};
  return threshold;
}

}  // namespace

const CpuKernels& kernels() { return *selected().load(std::memory_order_relaxed); }

bool select_kernels(const char* name) {
  const CpuKernels* found = find_kernels(name);
  if (found != nullptr) selected().store(found, std::memory_order_relaxed);
  return found != nullptr;
}

bool should_stream(int64_t output_bytes) { return output_bytes > stream_threshold().load(std::memory_order_relaxed); }

void set_stream_threshold(int64_t bytes) {
  stream_threshold().store(bytes < 0 ? last_level_cache_bytes() : bytes, std::memory_order_relaxed);
}

}  // namespace cpu
}  // namespace moe_opt
