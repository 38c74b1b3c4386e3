// NCCL's part between ranks that have an emulator each: takes tensors of the device only, and moves them over Gloo.
// Every call but send and receive is over when it returns.
#include <ATen/ATen.h>
#include <Python.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device.h"

namespace emulator {
namespace {

using at::Tensor;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

constexpr int kTag = 0x656d75;

struct Done : Work {
  explicit Done(Tensors results = {}) : results_(std::move(results)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  Tensors results_;
};

class Nccl : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, py::object options)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), options_(options.release().ptr()) {}
  ~Nccl() override {
    const py::gil_scoped_acquire gil;
    Py_DECREF(options_);
  }

  const std::string getBackendName() const override { return "nccl"; }
  py::object options() const { return py::reinterpret_borrow<py::object>(options_); }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
    const py::gil_scoped_acquire gil;
    options().attr("_timeout") = timeout;
  }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    Tensors host = written(tensors, getRank() == opts.rootRank);
    return finish(gloo_->broadcast(host, opts), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    Tensors host = written(tensors, true);
    c10d::AllreduceOptions of_gloo = opts;
    const bool average = opts.reduceOp == c10d::ReduceOp::AVG;
    if (average) of_gloo.reduceOp = c10d::ReduceOp::SUM;
    gloo_->allreduce(host, of_gloo)->wait();
    if (average) {
      for (Tensor& tensor : host) tensor.div_(getSize());
    }
    return done(tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    for (const Tensor& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, opts);
    }
    return done(tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    Tensors host = written(tensors, true);
    return finish(gloo_->reduce(host, opts), tensors);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    const Tensors nothing(getSize(), inputs[0].new_empty({0}));
    Tensors sent = nothing, received = getRank() == opts.rootRank ? outputs[0] : nothing;
    sent[opts.rootRank] = inputs[0];
    exchange(received, sent);
    return done(received);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    const Tensors nothing(getSize(), outputs[0].new_empty({0}));
    Tensors sent = getRank() == opts.rootRank ? inputs[0] : nothing, received = nothing;
    received[opts.rootRank] = outputs[0];
    exchange(received, sent);
    return done(outputs);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    exchange(outputs[0], Tensors(getSize(), inputs[0]));
    return done(outputs[0]);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    exchange(parts_of(output), Tensors(getSize(), input));
    return done({output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    for (size_t i = 0; i < inputs.size(); ++i) _allgather_base(outputs[i], inputs[i], opts);
    return done(outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    sum_of_exchange(outputs[0], inputs[0], opts.reduceOp);
    return done(outputs);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    sum_of_exchange(output, parts_of(input), opts.reduceOp);
    return done({output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    for (size_t i = 0; i < inputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], opts);
    return done(outputs);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    exchange(parts_of(output, output_splits), parts_of(input, input_splits));
    return done({output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    exchange(outputs, inputs);
    return done(outputs);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    Tensors host = read(tensors);
    return gloo_->send(host, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    Tensors host = written(tensors, false);
    for (const Tensor& tensor : tensors) mark_written(tensor);
    return gloo_->recv(host, from, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override { return finish(gloo_->barrier(opts), {}); }

 private:
  static void check(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense: NCCL was given one on ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  }
  static Tensors read(const Tensors& tensors) {
    Tensors host;
    for (const Tensor& tensor : tensors) {
      check(tensor);
      check_readable(tensor, "a collective");
      host.push_back(on_host(tensor));
    }
    return host;
  }
  static Tensors written(const Tensors& tensors, bool also_read) {
    if (also_read) return read(tensors);
    Tensors host;
    for (const Tensor& tensor : tensors) {
      check(tensor);
      host.push_back(on_host(tensor));
    }
    return host;
  }
  static WorkPtr done(Tensors results) {
    for (const Tensor& tensor : results) mark_written(tensor);
    return c10::make_intrusive<Done>(std::move(results));
  }
  static WorkPtr finish(const WorkPtr& work, Tensors results) {
    work->wait();
    return done(std::move(results));
  }

  Tensors parts_of(const Tensor& whole, const std::vector<int64_t>& splits = {}) const {
    check(whole);
    if (splits.empty()) return whole.view({-1}).chunk(getSize());
    return whole.split_with_sizes(splits);
  }

  void exchange(const Tensors& received, const Tensors& sent) {
    const Tensors from = read(sent), to = written(received, false);
    std::vector<std::pair<WorkPtr, Tensor>> works;
    const int rank = getRank(), size = getSize();
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank || to[peer].numel() == 0) continue;
      Tensors one{to[peer].view({-1}).view(at::kByte)};
      works.emplace_back(gloo_->recv(one, peer, kTag), one[0]);
    }
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank || from[peer].numel() == 0) continue;
      Tensors one{from[peer].view({-1}).view(at::kByte)};
      works.emplace_back(gloo_->send(one, peer, kTag), one[0]);
    }
    TORCH_CHECK(to[rank].numel() == from[rank].numel(), "the own block has two sizes");
    if (to[rank].const_data_ptr() != from[rank].const_data_ptr()) to[rank].view({-1}).copy_(from[rank].view({-1}));
    for (const auto& [work, held] : works) work->wait();
    for (const Tensor& tensor : received) mark_written(tensor);
  }

  void sum_of_exchange(const Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op) {
    check(output);
    TORCH_CHECK(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG, "the emulator sums or averages");
    Tensors parts;
    for (int peer = 0; peer < getSize(); ++peer) parts.push_back(at::empty_like(output));
    exchange(parts, inputs);
    Tensor sum = on_host(parts[0]).clone();
    for (int peer = 1; peer < getSize(); ++peer) sum += on_host(parts[peer]);
    if (op == c10d::ReduceOp::AVG) sum /= getSize();
    on_host(output).copy_(sum);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  PyObject* options_;  // of Python's class; this owns a reference
};

}  // namespace
}  // namespace emulator

// The stand-in over a ProcessGroupGloo of Python, with its options. Called through ctypes.PyDLL.
extern "C" PyObject* emulator_nccl(PyObject* gloo, PyObject* options) {
  using emulator::Nccl;
  static const auto type = py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(
                               py::module_::import("megatron_moe_opt._C"), "EmulatedNccl")
                               .def_property_readonly("options", &Nccl::options)
                               .def("_set_default_timeout", &Nccl::setTimeout);
  auto over = py::cast<c10::intrusive_ptr<c10d::Backend>>(py::handle(gloo));
  auto made = c10::make_intrusive<Nccl>(std::move(over), py::reinterpret_borrow<py::object>(options));
  return py::cast(std::move(made)).release().ptr();
}
