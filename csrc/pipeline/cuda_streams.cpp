#include "cuda_streams.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace moe_opt {
namespace pipeline {
namespace {

class CudaEvent : public Event {
 public:
  explicit CudaEvent(bool timed) {
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming));
  }
  ~CudaEvent() override { C10_CUDA_CHECK_WARN(cudaEventDestroy(event)); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  cudaEvent_t event = nullptr;
};

cudaEvent_t event_of(const Event& event) { return static_cast<const CudaEvent&>(event).event; }

class CudaStreams : public Streams {
 public:
  explicit CudaStreams(const std::vector<int>& priorities) : device_(c10::cuda::current_device()) {
    for (const int priority : priorities) {
      const auto stream = static_cast<cudaStream_t>(new_cuda_stream(priority));
      lanes_.push_back(c10::cuda::getStreamFromExternal(stream, device_).id());
    }
  }

  int num_lanes() const override { return static_cast<int>(lanes_.size()); }
  Stream of_lane(int lane) override { return lanes_[lane]; }
  Stream current() override { return c10::cuda::getCurrentCUDAStream(device_).id(); }

  std::unique_ptr<Event> record(Stream stream, bool timed) override {
    auto event = std::make_unique<CudaEvent>(timed);
    C10_CUDA_CHECK(cudaEventRecord(event->event, cuda(stream)));
    return event;
  }
  void wait(Stream stream, const Event& event) override {
    C10_CUDA_CHECK(cudaStreamWaitEvent(cuda(stream), event_of(event), 0));
  }

  void enqueue(Stream stream, Action& action) override {
    const c10::cuda::CUDAStreamGuard guard(cuda(stream));
    action.run();
  }
  void join(Stream stream, Action& action) override {
    const c10::cuda::CUDAStreamGuard guard(cuda(stream));
    action.join();
  }

  void synchronize(Stream stream) override { C10_CUDA_CHECK(cudaStreamSynchronize(cuda(stream))); }
  double seconds(const Event& from, const Event& to) override {
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, event_of(from), event_of(to)));
    return milliseconds * 1e-3;
  }

 private:
  c10::cuda::CUDAStream cuda(Stream stream) const {
    const c10::Device device(c10::DeviceType::CUDA, device_);
    return c10::cuda::CUDAStream(c10::cuda::CUDAStream::UNCHECKED, c10::Stream(c10::Stream::UNSAFE, device, stream));
  }

  const c10::DeviceIndex device_;
  std::vector<Stream> lanes_;
};

}  // namespace

std::unique_ptr<Streams> cuda_streams(const std::vector<int>& priorities) {
  return std::make_unique<CudaStreams>(priorities);
}

void* new_cuda_stream(int priority) {
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
  return stream;
}

}  // namespace pipeline
}  // namespace moe_opt
