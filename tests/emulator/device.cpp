// The emulated device as PyTorch's "cuda": memory, streams and copies here, every other operation on the CPU's kernels,
// over the same memory. For builds of PyTorch without CUDA.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "c10/cuda/CUDAGuard.h"
#include "counting.h"
#include "emulator.h"

namespace c10::cuda {
namespace {
thread_local StreamId current = 0;
}  // namespace
CUDAStream getCurrentCUDAStream(DeviceIndex) { return numbered(current); }
void setCurrentCUDAStream(CUDAStream stream) { current = stream.id(); }
}  // namespace c10::cuda

namespace emulator {

using at::Tensor;

Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

namespace {

// Calls visit(first byte, bytes) for the stretches of memory that a tensor's elements lie in.
template <typename Visit>
void for_stretches(const Tensor& tensor, const Visit& visit) {
  if (tensor.numel() == 0) return;
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  const int64_t size = tensor.element_size();
  if (tensor.is_non_overlapping_and_dense()) return visit(data, static_cast<size_t>(tensor.numel() * size));
  std::vector<int64_t> index(tensor.dim(), 0);
  const int64_t inner = tensor.dim() - 1;
  const bool rows = tensor.stride(inner) == 1;
  while (true) {
    int64_t offset = 0;
    for (int64_t d = 0; d <= inner; ++d) offset += index[d] * tensor.stride(d);
    visit(data + offset * size, static_cast<size_t>(rows ? tensor.size(inner) * size : size));
    int64_t d = rows ? inner - 1 : inner;
    while (d >= 0 && ++index[d] == tensor.size(d)) index[d--] = 0;
    if (d < 0) return;
  }
}

}  // namespace

void mark_written(const Tensor& tensor) {
  if (tensor.defined() && tensor.is_cuda()) for_stretches(tensor, host_writes);
}
void mark_unwritten(const Tensor& tensor) {
  if (tensor.defined() && tensor.is_cuda()) for_stretches(tensor, host_forgets);
}
bool is_unwritten(const Tensor& tensor) {
  bool all = true;
  for_stretches(tensor, [&](const void* data, size_t bytes) { all = all && nobody_wrote(data, bytes); });
  return all;
}
void check_readable(const Tensor& tensor, const std::string& what) {
  if (!tensor.defined() || !tensor.is_cuda()) return;
  for_stretches(tensor, [&](const void* data, size_t bytes) { host_reads(data, bytes, what.c_str()); });
}

namespace {

const at::Device kDevice(at::kCUDA, 0);
bool refuse_synchronisation = false;

// ---- Memory ----

struct DeviceAllocator : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = emulator::allocate(bytes);
    return {data, data, &emulator::release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &emulator::release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
} allocator;
const bool allocator_set = (c10::SetAllocator(c10::DeviceType::CUDA, &allocator, 1), true);

Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(at::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(at::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

void synchronises() { TORCH_CHECK(!refuse_synchronisation, "called a synchronizing CUDA operation"); }

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() != source.is_cuda() && !non_blocking) synchronises();
  check_readable(source, "a copy");
  on_host(self).copy_(on_host(source));
  mark_written(self);
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  synchronises();
  check_readable(self, "item()");
  return on_host(self).item();
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, self.storage_offset());
}
void record_stream(Tensor&, at::Stream) {}
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  const int64_t numel = c10::multiply_integers(sizes);
  if (static_cast<size_t>(numel * self.element_size()) > self.storage().nbytes()) {
    const Tensor fresh = at::empty(sizes, self.options());
    if (self.numel() > 0) std::memcpy(fresh.mutable_data_ptr(), self.const_data_ptr(), self.nbytes());
    mark_written(fresh);  // torch.distributed sends objects with whatever lies behind them
    impl->set_storage_keep_dtype(fresh.storage());
    impl->set_storage_offset(0);
  }
  impl->set_sizes_contiguous(sizes);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto numel = static_cast<int64_t>(source.nbytes()) / self.element_size();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({numel});
  return self;
}

// ---- Everything else ----

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t num_arguments = schema.arguments().size();
  const size_t begin = stack->size() - num_arguments;
  std::vector<Tensor> all, written;
  std::vector<std::pair<Tensor, Tensor>> grown;  // results without elements yet, and what stands for them
  std::vector<c10::IValue> originals(stack->begin() + static_cast<int64_t>(begin), stack->end());
  bool wants_device = false;
  const bool synchronising = schema.name() == "aten::nonzero";
  if (synchronising) synchronises();
  const bool adds_nothing = schema.name() == "aten::baddbmm" && originals[3].toScalar().toDouble() == 0;  // beta
  const bool copies_into_itself = schema.name() == "aten::index_copy" && originals.back().isTensor() &&
                                  originals.back().toTensor().is_same(originals[0].toTensor());
  for (size_t i = 0; i < num_arguments; ++i) {
    c10::IValue& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    const auto take = [&](const Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return tensor;
      all.push_back(tensor);
      if (writes) {
        if (tensor.numel() == 0) {
          grown.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
          return grown.back().second;
        }
        written.push_back(tensor);
      } else if (alias == nullptr &&
                 !(i == 0 && (adds_nothing || copies_into_itself))) {  // what makes a view reads nothing
        check_readable(tensor, schema.name());
      }
      return on_host(tensor);
    };
    if (value.isTensor()) {
      value = take(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(take(tensor));
      value = c10::List<Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor.has_value() ? std::optional<Tensor>(take(*tensor)) : std::nullopt);
      }
      value = std::move(list);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      wants_device = true;
      value = c10::Device(at::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (const Tensor& tensor : written) mark_written(tensor);
  for (auto& [tensor, result] : grown) {
    if (result.numel() > 0) copy_(const_cast<Tensor&>(tensor.resize_(result.sizes())), result, true);
  }
  if (all.empty() && !wants_device) return;

  const auto to_device = [&](const Tensor& result) -> Tensor {
    if (!result.defined() || result.is_cuda()) return result;
    if (is_device(result.const_data_ptr())) {  // a view of an argument
      for (const Tensor& argument : all) {
        const auto* first = static_cast<const char*>(argument.storage().data());
        const auto distance = static_cast<const char*>(result.const_data_ptr()) - first;
        if (distance < 0 || static_cast<size_t>(distance) >= argument.storage().nbytes()) continue;
        return at::native::as_strided_tensorimpl(
            argument.scalar_type() == result.scalar_type() ? argument : argument.view(result.scalar_type()),
            result.sizes(), result.strides(), distance / result.element_size());
      }
    }
    Tensor moved = at::empty_strided(result.sizes(), result.strides(), result.options().device(kDevice));
    copy_(moved, result, true);
    return moved;
  };
  const size_t num_returns = schema.returns().size();
  for (size_t r = 0; r < num_returns; ++r) {
    c10::IValue& value = (*stack)[stack->size() - num_returns + r];
    const auto* alias = schema.returns()[r].alias_info();
    if (alias != nullptr && alias->isWrite() && value.isTensor()) {
      for (size_t i = 0; i < num_arguments; ++i) {
        const auto* other = schema.arguments()[i].alias_info();
        if (other != nullptr && other->isWrite() && *other == *alias) value = originals[i];
      }
    } else if (value.isTensor()) {
      value = to_device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
      value = c10::List<Tensor>(list);
    }
  }
}

// ---- The device itself ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return at::kCUDA; }
  at::Device exchangeDevice(at::Device) const override { return kDevice; }
  at::Device getDevice() const override { return kDevice; }
  void setDevice(at::Device) const override {}
  void uncheckedSetDevice(at::Device) const noexcept override {}
  static at::Stream stream(c10::StreamId id) { return at::Stream(at::Stream::UNSAFE, kDevice, id); }
  at::Stream getStream(at::Device) const override { return stream(c10::cuda::getCurrentCUDAStream().id()); }
  at::Stream getDefaultStream(at::Device) const override { return stream(0); }
  at::Stream getStreamFromGlobalPool(at::Device, bool) const override {
    cudaStream_t name;
    cudaStreamCreateWithPriority(&name, cudaStreamNonBlocking, 0);
    return stream(reinterpret_cast<c10::StreamId>(name));
  }
  at::Stream getNewStream(at::Device, int) const override { return getStreamFromGlobalPool(kDevice, false); }
  at::Stream exchangeStream(at::Stream to) const override {
    const at::Stream before = getStream(kDevice);
    c10::cuda::setCurrentCUDAStream(c10::cuda::numbered(to.id()));
    return before;
  }
  at::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const at::Stream&, const at::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const at::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const at::DeviceIndex) const noexcept override {}
  bool queryStream(const at::Stream&) const override { return true; }
  void synchronizeStream(const at::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const at::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const at::Stream&) const override {}
};

struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  at::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(at::kCPU); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
};

}  // namespace
}  // namespace emulator

C10_REGISTER_GUARD_IMPL(CUDA, emulator::Guard)

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&emulator::on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  using namespace emulator;  // NOLINT
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("view", emulator::view);
  m.impl("as_strided", emulator::as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("record_stream", record_stream);
  m.impl("resize_", emulator::resize_);
  m.impl("set_.source_Storage", set_storage);
}

namespace at {
struct EmulatedCUDAHooks : emulator::Hooks {
  explicit EmulatedCUDAHooks(CUDAHooksArgs) {}
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, EmulatedCUDAHooks)
}  // namespace at

// What tests set and ask, by ctypes.
extern "C" void emulator_seed(uint64_t seed) { emulator::set_seed(seed); }
extern "C" void emulator_allow_races(bool allow) { emulator::allow_races(allow); }
extern "C" int64_t emulator_current_stream() { return c10::cuda::getCurrentCUDAStream().id(); }
extern "C" int64_t emulator_launches() { return emulator::launches(); }
extern "C" int64_t emulator_allocated() { return static_cast<int64_t>(emulator::allocated()); }
extern "C" int64_t emulator_most_allocated() { return static_cast<int64_t>(emulator::most_allocated()); }
extern "C" void emulator_reset_most_allocated() { emulator::reset_most_allocated(); }
extern "C" void emulator_begin_counting() { emulator::counting::begin(); }
extern "C" const char* emulator_end_counting() {
  static std::string lines;
  lines = emulator::counting::end();
  return lines.c_str();
}
extern "C" void emulator_set_multiprocessors(int number) { emulator::multiprocessors = number; }
extern "C" void emulator_refuse_synchronisation(bool refuse) { emulator::refuse_synchronisation = refuse; }
