// NCCL's part between ranks that have an emulator each: takes tensors of the device only, and moves them over Gloo.
//
// Calls are late: what arrives is put into the outputs when the work is waited for, or that of a later collective of
// the communicator, or when a later one uses it; until then nobody has written them. They are strict: what is sent must
// not change and outputs must not be written in between, and ranks must agree on the number and the name of each call.
#include <ATen/ATen.h>
#include <Python.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device.h"

namespace emulator {
namespace {

using at::Tensor;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

constexpr int kCalls = 0x656d75, kMessages = 0x656d76;  // tags of headers
constexpr std::chrono::seconds kEnd{10};                // how long a communicator's end waits for peers
const char* const kMessage = "message";
std::string never_waited_for;  // the name of calls whose waits are left out: a mutant

// Goes ahead of what a rank sends.
struct Header {
  uint64_t number, bytes;
  char name[48];

  Tensor tensor() const {
    Tensor made = at::empty({sizeof(Header)}, at::kByte);
    std::memcpy(made.mutable_data_ptr(), this, sizeof(Header));
    return made;
  }
  std::string words() const { return std::string(name) + " as call " + std::to_string(number); }
  // Of the bytes behind it: they meet nothing but a receive that expects them.
  int tag() const {
    const size_t all = std::hash<std::string>()(words() + " " + std::to_string(bytes));
    return static_cast<int>(all % 0x3fffffff);
  }
};
Header header(const std::string& name, uint64_t number, size_t bytes) {
  Header made{number, bytes, {}};
  std::strncpy(made.name, name.c_str(), sizeof(made.name) - 1);
  return made;
}

Tensor bytes_of(const Tensor& host) { return host.contiguous().view({-1}).view(at::kByte); }

struct Call {
  std::string name;
  uint64_t number;
  Tensors sent, copies;  // on the device, and as they were when the call was issued
  Tensors outputs;
  Tensors arrived;                                                  // of each rank
  std::function<void(const Tensors&)> finish = [](const auto&) {};  // puts what has arrived into the outputs
  struct Incoming {
    int peer;
    Tensor header, data;
    WorkPtr of_header, of_data;
  };
  std::vector<Incoming> incoming;
  std::vector<std::pair<WorkPtr, Tensor>> outgoing;
  bool over = false;
};
using CallPtr = std::shared_ptr<Call>;

class Nccl : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, py::object options)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        options_(options.release().ptr()),
        sent_to_(getSize()),
        received_from_(getSize()) {}
  ~Nccl() override {
    {
      std::optional<py::gil_scoped_release> others_may_run;
      if (PyGILState_Check()) others_may_run.emplace();
      end();
    }
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
    const Tensor tensor = tensors.at(0);
    const int root = static_cast<int>(opts.rootRank);
    Tensors sent = nothing(), received = nothing();
    if (getRank() == root) {
      for (int peer = 0; peer < getSize(); ++peer) {
        if (peer != root) sent[peer] = tensor;
      }
      return collective("broadcast", sent, received, {}, [](const auto&) {}, tensors);
    }
    received[root] = tensor;
    return collective("broadcast", sent, received, tensors, placing(received), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    const Tensor tensor = tensors.at(0);
    const Tensors all(getSize(), tensor);
    return collective("allreduce", all, all, tensors, reducing(tensor, opts.reduceOp), tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return of_each(tensors.size(), [&](size_t i) {
      Tensors one{tensors[i]};
      return allreduce(one, opts);
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const Tensor tensor = tensors.at(0);
    const int root = static_cast<int>(opts.rootRank);
    Tensors sent = nothing();
    sent[root] = tensor;
    if (getRank() != root) return collective("reduce", sent, nothing(), {}, [](const auto&) {}, tensors);
    return collective("reduce", sent, Tensors(getSize(), tensor), tensors, reducing(tensor, opts.reduceOp), tensors);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    Tensors sent = nothing(), received = getRank() == opts.rootRank ? outputs[0] : nothing();
    sent[opts.rootRank] = inputs[0];
    return exchange("gather", received, sent);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    Tensors sent = getRank() == opts.rootRank ? inputs[0] : nothing(), received = nothing();
    received[opts.rootRank] = outputs[0];
    return exchange("scatter", received, sent);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return exchange("allgather", outputs[0], Tensors(getSize(), inputs[0]));
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return exchange("allgather_base", parts_of(output), Tensors(getSize(), input.view({-1})));
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return of_each(inputs.size(), [&](size_t i) { return _allgather_base(outputs[i], inputs[i], opts); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return sum_of_exchange("reduce_scatter", outputs[0], inputs[0], opts.reduceOp);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return sum_of_exchange("reduce_scatter_base", output, parts_of(input), opts.reduceOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return of_each(inputs.size(), [&](size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], opts); });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    return exchange("alltoall_base", parts_of(output, output_splits), parts_of(input, input_splits));
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return exchange("alltoall", outputs, inputs);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return exchange("barrier", nothing(), nothing()); }
  WorkPtr send(Tensors& tensors, int to, int) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    Tensors sent = nothing();
    sent[to] = tensors.at(0);
    const auto call = begin(kMessage, sent_to_[to]++, sent, {});
    send_ahead(*call, to, kMessages);
    return late(call, {});
  }
  WorkPtr recv(Tensors& tensors, int from, int) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto call = begin(kMessage, received_from_[from]++, nothing(), tensors);
    Tensors received = nothing();
    received[from] = tensors.at(0);
    call->arrived = hosts_like(received);
    call->finish = placing(received);
    expect(*call, from, kMessages);
    return late(call, tensors);
  }

  // Until the call, and the collectives before it, have put what arrived into their outputs.
  void complete(const CallPtr& call, std::chrono::milliseconds timeout) {
    const std::lock_guard<std::mutex> lock(mutex_);
    complete_locked(call, timeout);
  }

 private:
  using Finish = std::function<void(const Tensors&)>;

  struct Late : Work {
    Late(c10::intrusive_ptr<Nccl> group, CallPtr call, Tensors results)
        : group_(std::move(group)), call_(std::move(call)), results_(std::move(results)) {}
    bool isCompleted() override { return wait(kNoTimeout); }  // time passes while somebody asks
    bool isSuccess() const override { return true; }
    void synchronize() override { wait(kNoTimeout); }
    Tensors result() override { return results_; }
    bool wait(std::chrono::milliseconds timeout) override {
      if (call_->name != never_waited_for) group_->complete(call_, timeout);
      return true;
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
      wait(kNoTimeout);
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      future->markCompleted(c10::IValue(results_));
      return future;
    }

   private:
    c10::intrusive_ptr<Nccl> group_;
    CallPtr call_;
    Tensors results_;
  };

  // ---- Issue ----

  WorkPtr collective(const char* name, const Tensors& sent, const Tensors& received, const Tensors& outputs,
                     Finish finish, Tensors results) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = pending_.size(); i-- > 0;) {
      if (!uses_outputs(*pending_[i], sent) && !uses_outputs(*pending_[i], outputs)) continue;
      complete_locked(CallPtr(pending_[i]), kNoTimeout);  // on NCCL the later one runs behind the earlier one
      break;
    }
    const auto call = begin(name, issued_++, sent, outputs);
    call->arrived = hosts_like(received);
    call->finish = std::move(finish);
    const int rank = getRank(), size = getSize();
    TORCH_CHECK(call->arrived[rank].numel() == call->copies[rank].numel(), "the own block has two sizes");
    call->arrived[rank] = call->copies[rank].view(call->arrived[rank].sizes());
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) expect(*call, peer, kCalls);
    }
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) send_ahead(*call, peer, kCalls);
    }
    pending_.push_back(call);
    return late(call, std::move(results));
  }

  WorkPtr exchange(const char* name, const Tensors& received, const Tensors& sent) {
    return collective(name, sent, received, received, placing(received), received);
  }

  WorkPtr sum_of_exchange(const char* name, const Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op) {
    return collective(name, inputs, Tensors(getSize(), output), {output}, reducing(output, op), {output});
  }

  template <typename Issue>
  WorkPtr of_each(size_t number, const Issue& issue) {
    WorkPtr last;
    for (size_t i = 0; i < number; ++i) last = issue(i);
    return last;
  }

  // A call of which nothing moves yet.
  CallPtr begin(const char* name, uint64_t number, const Tensors& sent, const Tensors& outputs) {
    auto call = std::make_shared<Call>();
    call->name = name, call->number = number, call->sent = memory_of(sent), call->outputs = memory_of(outputs);
    for (const Tensor& tensor : sent) {
      check(tensor);
      check_readable(tensor, name);
      const bool again = !call->copies.empty() && tensor.is_same(sent[call->copies.size() - 1]);
      call->copies.push_back(again ? call->copies.back() : on_host(tensor).clone());
    }
    for (const Tensor& tensor : outputs) {
      check(tensor);
      mark_unwritten(tensor);
    }
    return call;
  }

  void send_ahead(Call& call, int peer, int tag) {
    const Tensor data = bytes_of(call.copies[peer]);
    const Header ahead = header(call.name, call.number, data.nbytes());
    send_to(call, peer, tag, ahead.tensor());
    if (data.numel() > 0) send_to(call, peer, ahead.tag(), data);
  }
  void send_to(Call& call, int peer, int tag, const Tensor& bytes) {
    Tensors one{bytes};
    call.outgoing.emplace_back(gloo_->send(one, peer, tag), bytes);
  }

  void expect(Call& call, int peer, int tag) {
    Call::Incoming from{peer, at::empty({sizeof(Header)}, at::kByte), call.arrived[peer].view({-1}).view(at::kByte)};
    Tensors of_header{from.header}, of_data{from.data};
    from.of_header = gloo_->recv(of_header, peer, tag);
    const Header expected = header(call.name, call.number, from.data.nbytes());
    if (from.data.numel() > 0) from.of_data = gloo_->recv(of_data, peer, expected.tag());
    call.incoming.push_back(std::move(from));
  }

  WorkPtr late(const CallPtr& call, Tensors results) {
    auto group = c10::intrusive_ptr<Nccl>::unsafe_reclaim_from_nonowning(this);
    return c10::make_intrusive<Late>(std::move(group), call, std::move(results));
  }

  // ---- Completion ----

  void complete_locked(const CallPtr& call, std::chrono::milliseconds timeout) {
    if (call->name == kMessage && !call->over) conclude(call, timeout);
    while (!call->over) {
      const CallPtr first = pending_.front();
      pending_.pop_front();
      conclude(first, timeout);
    }
  }

  void conclude(const CallPtr& call, std::chrono::milliseconds timeout) {
    call->over = true;
    try {
      place(*call, timeout);
    } catch (...) {
      failed_.push_back(call);
      throw;
    }
    *call = Call{call->name, call->number};
    call->over = true;
  }

  // Puts what arrives into the outputs, and looks whether everybody did as they should.
  void place(Call& call, std::chrono::milliseconds timeout) {
    for (Call::Incoming& from : call.incoming) {
      from.of_header->wait(timeout);
      Header theirs;
      std::memcpy(&theirs, from.header.const_data_ptr(), sizeof(Header));
      const Header ours = header(call.name, call.number, from.data.nbytes());
      TORCH_CHECK(theirs.words() == ours.words() && theirs.bytes == ours.bytes, "ranks of the communicator ",
                  getGroupDesc(), " do not agree: rank ", from.peer, " issued ", theirs.words(), ", which sends ",
                  theirs.bytes, " bytes to rank ", getRank(), "; that issued ", ours.words(), ", which expects ",
                  ours.bytes, " bytes of it");
    }
    for (Call::Incoming& from : call.incoming) {
      if (from.of_data) from.of_data->wait(timeout);
    }
    for (const auto& [work, bytes] : call.outgoing) work->wait(timeout);
    for (size_t i = 0; i < call.sent.size(); ++i) {
      const Tensor now = on_host(call.sent[i]);
      TORCH_CHECK(std::memcmp(now.const_data_ptr(), call.copies[i].const_data_ptr(), now.nbytes()) == 0, call.name,
                  ": what it sends was changed before it was over");
    }
    for (const Tensor& output : call.outputs) {
      TORCH_CHECK(is_unwritten(output), call.name, ": its output was written before it was over");
    }
    call.finish(call.arrived);
    for (const Tensor& output : call.outputs) mark_written(output);
  }

  // What nobody has waited for.
  void end() {
    try {
      while (!pending_.empty()) complete(CallPtr(pending_.back()), kEnd);
    } catch (const std::exception& error) {
      std::cerr << "emulator: a communicator ends while calls are under way: " << error.what() << std::endl;
    }
  }

  // ---- Tensors ----

  static void check(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense: NCCL was given one on ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  }

  static bool uses_outputs(const Call& call, const Tensors& tensors) {
    const auto begin = [](const Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); };
    for (const Tensor& output : call.outputs) {
      for (const Tensor& tensor : tensors) {
        const bool apart =
            begin(tensor) + tensor.nbytes() <= begin(output) || begin(output) + output.nbytes() <= begin(tensor);
        if (!apart && tensor.numel() > 0 && output.numel() > 0) return true;
      }
    }
    return false;
  }

  Tensors nothing() const { return Tensors(getSize(), at::empty({0}, at::TensorOptions(at::kByte).device(at::kCUDA))); }

  // Whoever has the tensors may give them other memory (Megatron does so to what it has sent).
  static Tensors memory_of(Tensors tensors) {
    for (Tensor& tensor : tensors) tensor = tensor.detach();
    return tensors;
  }

  static Tensors hosts_like(const Tensors& tensors) {
    Tensors host;
    for (const Tensor& tensor : tensors) host.push_back(at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
    return host;
  }

  Tensors parts_of(const Tensor& whole, const std::vector<int64_t>& splits = {}) const {
    check(whole);
    if (splits.empty()) return whole.view({-1}).chunk(getSize());
    return whole.split_with_sizes(splits);
  }

  static Finish placing(Tensors received) {
    return [received = memory_of(std::move(received))](const Tensors& arrived) {
      for (size_t peer = 0; peer < received.size(); ++peer) {
        if (received[peer].numel() > 0) on_host(received[peer]).view({-1}).copy_(arrived[peer].view({-1}));
      }
    };
  }

  // In rank order.
  static Finish reducing(const Tensor& output, const c10d::ReduceOp& op) {
    return [output = output.detach(), op](const Tensors& arrived) {
      Tensor total = arrived[0].clone();
      for (size_t peer = 1; peer < arrived.size(); ++peer) {
        if (op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG) {
          total += arrived[peer];
        } else if (op == c10d::ReduceOp::MAX || op == c10d::ReduceOp::MIN) {
          total = op == c10d::ReduceOp::MAX ? at::maximum(total, arrived[peer]) : at::minimum(total, arrived[peer]);
        } else {
          TORCH_CHECK(false, "the emulator sums, averages, or takes the largest or smallest");
        }
      }
      if (op == c10d::ReduceOp::AVG) total /= static_cast<double>(arrived.size());
      on_host(output).view({-1}).copy_(total.view({-1}));
    };
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  PyObject* options_;  // of Python's class; this owns a reference
  std::mutex mutex_;   // guards what follows
  uint64_t issued_ = 0;
  std::vector<uint64_t> sent_to_, received_from_;  // messages
  std::deque<CallPtr> pending_;                    // collectives
  std::vector<CallPtr> failed_;                    // whose messages may still have to tell peers so
};

}  // namespace
}  // namespace emulator

// Has nobody wait for calls of this name any more ("": for none).
extern "C" void emulator_never_wait_for(const char* name) { emulator::never_waited_for = name; }

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
