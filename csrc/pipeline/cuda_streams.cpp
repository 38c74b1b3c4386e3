#include "cuda_streams.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace moe_opt {
namespace pipeline {
namespace {

// Tells PyTorch's CUDA sanitizer, where it is on, as PyTorch's own events and streams do: report(it).
template <typename Report>
void trace(const Report& report) {
  const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace();
  if (C10_UNLIKELY(interpreter != nullptr)) report(*interpreter->vtable_);
}

template <typename Handle>
uintptr_t number(Handle handle) {
  return reinterpret_cast<uintptr_t>(handle);
}

class CudaEvent : public Event {
 public:
  explicit CudaEvent(bool timed) {
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming));
    trace([&](const auto& it) { it.trace_gpu_event_creation(c10::kCUDA, number(event)); });
  }
  ~CudaEvent() override {
    trace([&](const auto& it) { it.trace_gpu_event_deletion(c10::kCUDA, number(event)); });
    C10_CUDA_CHECK_WARN(cudaEventDestroy(event));
  }
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
    const c10::cuda::CUDAGuard guard(device_);  // the calling thread's own device may be another
    auto event = std::make_unique<CudaEvent>(timed);
    const cudaStream_t on = cuda(stream);
    C10_CUDA_CHECK(cudaEventRecord(event->event, on));
    trace([&](const auto& it) { it.trace_gpu_event_record(c10::kCUDA, number(event->event), number(on)); });
    return event;
  }
  void wait(Stream stream, const Event& event) override {
    const c10::cuda::CUDAGuard guard(device_);
    const cudaStream_t on = cuda(stream);
    C10_CUDA_CHECK(cudaStreamWaitEvent(on, event_of(event), 0));
    trace([&](const auto& it) { it.trace_gpu_event_wait(c10::kCUDA, number(event_of(event)), number(on)); });
  }

  void enqueue(Stream stream, Action& action) override {
    const c10::cuda::CUDAStreamGuard guard(cuda(stream));
    action.run();
  }
  void join(Stream stream, Action& action) override {
    const c10::cuda::CUDAStreamGuard guard(cuda(stream));
    action.join();
  }

  void synchronize(Stream stream) override { c10::cuda::stream_synchronize(cuda(stream)); }
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
  trace([&](const auto& it) { it.trace_gpu_stream_creation(c10::kCUDA, number(stream)); });
  return stream;
}

}  // namespace pipeline
}  // namespace moe_opt
