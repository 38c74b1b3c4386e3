// CUDA's streams and events for the stream executor. A process group of NCCL joins by its work's own wait.
#pragma once

#include <memory>
#include <vector>

#include "streams.h"

namespace moe_opt {
namespace pipeline {

// A stream on the current device for each lane, of the given priority: 0 is the default, lower goes first.
std::unique_ptr<Streams> cuda_streams(const std::vector<int>& priorities);

// A stream of the current device, which is nobody else's, for as long as the process lives: a cudaStream_t.
//
// PyTorch's own streams come from a pool of 32 that it hands out in turn, to NCCL's process groups, to Megatron and to
// whoever asks: two of them may be the same stream, and then wait for each other unasked. Never destroyed: PyTorch's
// allocator keeps memory that it may still record an event for on the stream.
void* new_cuda_stream(int priority);

}  // namespace pipeline
}  // namespace moe_opt
