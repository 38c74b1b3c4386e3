// How kernels of the CPU use several threads, whoever owns these.
#pragma once

#include <cstdint>
#include <functional>

namespace moe_opt::cpu {

// Calls body(i) for every i in [0, count), on as many threads as it likes, and returns when all calls have.
using ForEach = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

}  // namespace moe_opt::cpu
