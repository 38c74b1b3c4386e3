// The executor on an accelerator: a stream a lane, events between them. The host only issues, in the order of the ops.
// An op of several kernels, as experts are, may say when it has issued half of them: then come those of `meanwhile`.
//
// A collective is left running by the op that issues it, on a stream of its process group. Whoever needs it waits just
// before its own work: the next op of the lane, an op of another lane that waits for this one, and the caller's stream
// at the end. A wait that was queued right behind the collective would, where all streams share one hardware queue
// (CUDA_DEVICE_MAX_CONNECTIONS=1), hold up all that is issued after it.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "streams.h"

namespace moe_opt {
namespace pipeline {

class StreamExecutor {
 public:
  explicit StreamExecutor(std::unique_ptr<Streams> streams) : streams_(std::move(streams)) {}

  // As Executor::run, but returns as soon as all is issued: later work on the current stream waits for all ops. One
  // thread at a time, which nothing checks: runs may be nested, as an op's backward pass may be in autograd's thread.
  // `caller_lane` (-1: none) is the current stream. Memory that was allocated there may be freed after the call. With
  // `spans` it also waits for the device.
  std::optional<Failure> run(const std::vector<Op>& ops, int caller_lane, std::vector<Span>* spans);

  // For an action, in whichever thread: issues what is to be issued halfway through its op, or nothing if that has
  // been. Where no action of the op asks for it, it follows behind the op.
  void issue_meanwhile();

 private:
  class Issue;

  std::unique_ptr<Streams> streams_;
  Issue* issue_ = nullptr;  // the run under way
};

}  // namespace pipeline
}  // namespace moe_opt
