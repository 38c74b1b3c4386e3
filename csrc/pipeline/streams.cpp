#include "streams.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <string>

namespace moe_opt {
namespace pipeline {
namespace {

class Event {
 public:
  explicit Event(bool timed) {
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming));
  }
  ~Event() {
    if (event_ != nullptr) C10_CUDA_CHECK_WARN(cudaEventDestroy(event_));
  }
  Event(Event&& other) noexcept : event_(other.event_) { other.event_ = nullptr; }
  Event(const Event&) = delete;

  void record(const c10::cuda::CUDAStream& stream) const { C10_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  void delay(const c10::cuda::CUDAStream& stream) const { C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }
  double seconds_since(const Event& earlier) const {
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, earlier.event_, event_));
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

StreamExecutor::StreamExecutor(const std::vector<int>& priorities) {
  for (const int priority : priorities) streams_.push_back(c10::cuda::getStreamFromPool(priority));
}

std::optional<Failure> StreamExecutor::run(const std::vector<Op>& ops, int caller_lane, std::vector<Span>* spans) {
  check_ops(ops, static_cast<int>(streams_.size()));
  Inside::refuse(this);
  const Inside inside(this);
  const bool timed = spans != nullptr;
  const c10::cuda::CUDAStream caller = c10::cuda::getCurrentCUDAStream();
  const auto stream_of = [&](int lane) { return lane == caller_lane ? caller : streams_[lane]; };

  const Event begin(timed);
  begin.record(caller);
  std::vector<int> last_op(streams_.size(), -1);  // of each lane
  std::vector<Event> started, done;
  std::optional<Failure> failure;
  for (size_t i = 0; i < ops.size() && !failure; ++i) {
    const Op& op = ops[i];
    const c10::cuda::CUDAStream stream = stream_of(op.lane);
    if (last_op[op.lane] < 0 && op.lane != caller_lane) begin.delay(stream);
    for (const int other : op.waits_for) {
      if (ops[other].lane != op.lane) done[other].delay(stream);
    }
    if (timed) {
      started.emplace_back(timed);
      started.back().record(stream);
    }
    try {
      const c10::cuda::CUDAStreamGuard guard(stream);
      for (const auto& action : op.actions) action->run();
    } catch (const PeerError& error) {
      failure = Failure{static_cast<int>(i), error.peer, error.what()};
    } catch (const std::exception& error) {
      failure = Failure{static_cast<int>(i), -1, error.what()};
    }
    done.emplace_back(timed);
    done.back().record(stream);
    last_op[op.lane] = static_cast<int>(i);
  }
  for (size_t lane = 0; lane < last_op.size(); ++lane) {
    if (last_op[lane] >= 0 && static_cast<int>(lane) != caller_lane) done[last_op[lane]].delay(caller);
  }
  if (timed) {
    C10_CUDA_CHECK(cudaStreamSynchronize(caller));
    spans->assign(ops.size(), Span{});
    for (size_t i = 0; i < done.size(); ++i) {
      (*spans)[i] = {started[i].seconds_since(begin), done[i].seconds_since(begin)};
    }
  }
  return failure;
}

}  // namespace pipeline
}  // namespace moe_opt
