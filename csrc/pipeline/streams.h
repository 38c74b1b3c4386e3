// The executor on CUDA: a stream a lane, events between them. The host only issues, in the order of the ops.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <vector>

#include "executor.h"

namespace moe_opt {
namespace pipeline {

class StreamExecutor {
 public:
  // One stream on the current device for each lane, of the given priority: 0 is the default, lower goes first.
  explicit StreamExecutor(const std::vector<int>& priorities);

  // As Executor::run, but returns as soon as all is issued: later work on the current stream waits for all ops.
  // `caller_lane` (-1: none) is the current stream. Memory that was allocated there may be freed after the call. With
  // `spans` it also waits for the device. Actions run on their lane's stream being the current one.
  std::optional<Failure> run(const std::vector<Op>& ops, int caller_lane, std::vector<Span>* spans);

 private:
  std::vector<c10::cuda::CUDAStream> streams_;
};

}  // namespace pipeline
}  // namespace moe_opt
