#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "bindings/chunk_copy.h"
#include "bindings/module.h"
#include "bindings/wire_format.h"
#include "kernels/sum_parts.h"
#include "pipeline/exchange.h"
#include "pipeline/executor.h"

namespace moe_opt {
namespace {

using pipeline::Action;
using ActionPtr = std::shared_ptr<Action>;
using ExchangePtr = std::shared_ptr<pipeline::Exchange>;

// An action that is a function, with whatever it holds.
template <typename Function>
ActionPtr make_action(Function function) {
  struct FunctionAction : Action {
    explicit FunctionAction(Function function) : function(std::move(function)) {}
    void run() override { function(); }
    Function function;
  };
  return std::make_shared<FunctionAction>(std::move(function));
}

using RowBlocks = std::vector<std::pair<Size<"first row">, Size<"number of rows">>>;

pipeline::BlocksOfRows row_blocks(const Memory& memory, const char* name, const RowBlocks& blocks) {
  const Tensor& rows = memory.tensor();
  for (const auto& [first, count] : blocks) {
    check(first + count <= rows.size(0), name, ": rows [", first, ", ", first + count, ") are outside [0, ",
          rows.size(0), ")");
  }
  return {rows, {blocks.begin(), blocks.end()}};
}

ExchangePtr exchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Buffer<"sent">& sent,
                     const RowBlocks& sent_blocks, const Buffer<"received">& received,
                     const RowBlocks& received_blocks) {
  struct CheckedExchange : pipeline::Exchange {
    CheckedExchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Memory& sent,
                    const RowBlocks& sent_blocks, const Memory& received, const RowBlocks& received_blocks)
        : Exchange(group, row_blocks(sent, "sent", sent_blocks), row_blocks(received, "received", received_blocks)),
          sent(sent),
          received(received) {}
    void begin() override {
      check(!ran.exchange(true), "an exchange was run before: make a new one, as its peers do");
      sent.tensor(), received.tensor();  // still there
      Exchange::begin();
    }
    const Memory sent, received;
    std::atomic<bool> ran{false};
  };
  check(group.defined(), "an exchange needs a process group, not None");
  check_contiguous(sent);
  check_contiguous(received);
  check(sent.device() == received.device() && sent.scalar_type() == received.scalar_type() && sent.dim() >= 1 &&
            received.dim() >= 1 && sent.sizes().slice(1) == received.sizes().slice(1),
        "an exchange's rows must have one dtype, device and width, but are ", sent.sizes(), " and ", received.sizes());
  const size_t rank = group->getRank();
  check(rank < std::min(sent_blocks.size(), received_blocks.size()) &&
            sent_blocks[rank].second == received_blocks[rank].second,
        "an exchange needs one block to and one from each of the ", group->getSize(),
        " ranks, the same number of rows to and from itself");
  return std::make_shared<CheckedExchange>(group, Memory(sent), sent_blocks, Memory(received), received_blocks);
}

void check_row_matrix(const Argument& rows) {
  check(rows.dim() == 1 || rows.dim() == 2, rows.name, " must have 1 or 2 dimensions, but its shape is ", rows.sizes());
  check_contiguous(rows);
}

// Chunks that an action keeps: on the CPU a copy, which stays as it was checked.
class KeptChunks {
 public:
  KeptChunks(const ChunkTensors& tensors, int64_t source_rows, int64_t target_rows, const at::Device& device)
      : num_rows_(std::get<3>(tensors)) {
    const ChunkList given = view(tensors, device);
    num_chunks_ = given.num_chunks;
    if (!device.is_cpu()) {
      const auto& [sources, targets, counts, num_rows] = tensors;
      on_device_ = {Memory(sources), Memory(targets), Memory(counts)};
      return;
    }
    for (const int64_t* numbers : {given.source_rows, given.target_rows, given.row_counts}) {
      on_host_.insert(on_host_.end(), numbers, numbers + num_chunks_);
    }
    check_chunks(list(), num_rows_, source_rows, target_rows);
  }

  int64_t num_rows() const { return num_rows_; }

  ChunkList list() const {
    const auto numbers = [&](int64_t which) {
      return on_device_.empty() ? on_host_.data() + which * num_chunks_
                                : static_cast<const int64_t*>(on_device_[which].data());
    };
    return {num_chunks_, numbers(0), numbers(1), numbers(2)};
  }

 private:
  int64_t num_rows_, num_chunks_;
  std::vector<int64_t> on_host_;
  std::vector<Memory> on_device_;
};

// Copies row_bytes bytes of every chunk's rows, from source_byte of a source row to target_byte of a target row.
ActionPtr copy_rows(const Buffer<"source">& source, Size<"source_byte"> source_byte, const Buffer<"target">& target,
                    Size<"target_byte"> target_byte, Size<"row_bytes"> row_bytes, const ChunkTensors& chunk_tensors) {
  check_row_matrix(source);
  check_row_matrix(target);
  check(source.device() == target.device(), "copy_rows: source is on ", source.device(), ", target on ",
        target.device());
  check(!overlap(source, target), "copy_rows: source and target share memory");
  const int64_t from_bytes = const_rows(source).stride_bytes, to_bytes = const_rows(target).stride_bytes;
  check(source_byte + row_bytes <= from_bytes && target_byte + row_bytes <= to_bytes, "copy_rows: ", row_bytes,
        " bytes at ", source_byte, " and ", target_byte, " do not fit rows of ", from_bytes, " and ", to_bytes,
        " bytes");
  return make_action([from = Memory(source), to = Memory(target), source_byte = source_byte.value,
                      target_byte = target_byte.value, row_bytes = row_bytes.value,
                      chunks = KeptChunks(chunk_tensors, source.size(0), target.size(0), source.device())] {
    run_copy_chunks(from.tensor(), chunks.list(), row_bytes, const_rows(from.tensor(), source_byte),
                    mutable_rows(to.tensor(), target_byte), chunks.num_rows());
  });
}

// Moves the payloads of every chunk's rows, which begin at byte 0, and converts them to the target's format.
ActionPtr convert_chunks(const Buffer<"source">& source, const std::string& source_wire, const Buffer<"target">& target,
                         const std::string& target_wire, Size<"hidden"> hidden, const ChunkTensors& chunk_tensors) {
  const at::Device device = source.device();
  const DType from = check_wire_rows(source, source_wire, hidden, std::nullopt, device);
  const DType to = check_wire_rows(target, target_wire, hidden, std::nullopt, device);
  check(from == to || converts(from, to), "convert_chunks: no conversion of rows in ", source_wire, " (",
        source.scalar_type(), ") to rows in ", target_wire, " (", target.scalar_type(), ")");
  check(!overlap(source, target), "convert_chunks: source and target share memory");
  return make_action([from_rows = Memory(source), to_rows = Memory(target), from, to, hidden = hidden.value,
                      chunks = KeptChunks(chunk_tensors, source.size(0), target.size(0), device)] {
    const Tensor& on = from_rows.tensor();
    const ConstRows in = const_rows(on);
    const MutableRows out = mutable_rows(to_rows.tensor());
    const int64_t num_rows = chunks.num_rows(), bytes = payload_bytes(from, hidden);
    if (from == to) return run_copy_chunks(on, chunks.list(), bytes, in, out, num_rows);
    MOE_OPT_IF_CUDA(on, cuda::convert_chunks(chunks.list(), from, to, hidden, in, out, num_rows, call.stream)) {
      for_row_ranges(num_rows, bytes, [&](int64_t begin, int64_t end) {
        cpu::convert_chunks(chunks.list(), from, to, hidden, in, out, num_rows, begin, end);
      });
    }
  });
}

// out[r] = sum of parts[p][r], over `width` elements that start at first_byte of a row: of a dtype, or the payload of
// rows in a wire format.
ActionPtr sum_parts(const std::vector<Buffer<"a part">>& parts, const Buffer<"the sum">& out,
                    Size<"first_byte"> first_byte, Size<"width"> width,
                    const std::variant<ScalarType, std::string>& elements) {
  const DType type = [&] {
    if (const auto* wire = std::get_if<std::string>(&elements)) return wire_format(out.scalar_type(), *wire, "the sum");
    const ScalarType dtype = std::get<ScalarType>(elements);
    return dtype == ScalarType::Double ? DType::kFloat64 : kernel_dtype(dtype, "the parts");
  }();
  check(!parts.empty(), "sum_parts needs at least one part");
  check_row_matrix(out);
  std::vector<Memory> sources;
  for (const Argument& part : parts) {
    check_row_matrix(part);
    check(part.sizes() == out.sizes() && part.device() == out.device() && part.scalar_type() == out.scalar_type(),
          "a part of shape ", part.sizes(), " does not fit the sum's ", out.sizes());
    sources.emplace_back(part);
  }
  const int64_t row_bytes = const_rows(out).stride_bytes, first = first_byte, count = width;
  check(
      first + (has_scales(type) ? payload_bytes(type, count) : bounded_product(count, element_size(type))) <= row_bytes,
      "sum_parts: ", count, " elements at byte ", first, " do not fit rows of ", row_bytes, " bytes");
  return make_action([sources = std::move(sources), to = Memory(out), type, first, count] {
    const Tensor& out = to.tensor();
    if (out.numel() == 0 || count == 0) return;
    std::vector<ConstRows> rows;
    for (const Memory& source : sources) rows.push_back(const_rows(source.tensor(), first));
    const MutableRows target = mutable_rows(out, first);
    const int num_parts = static_cast<int>(rows.size());
    MOE_OPT_IF_CUDA(out, cuda::sum_parts(type, count, rows.data(), num_parts, target, out.size(0), call.stream)) {
      for_row_ranges(out.size(0), count * element_size(type), [&](int64_t begin, int64_t end) {
        cpu::sum_parts(type, count, rows.data(), num_parts, target, begin, end);
      });
    }
  });
}

ActionPtr call_python(const py::function& function) {
  return make_action([function] {
    py::gil_scoped_acquire gil;
    try {
      function();
    } catch (py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  });
}

// The action as one that a profiler shows under a name, whichever thread runs it: PyTorch's profiler, or nsys through
// its NVTX ranges.
ActionPtr named(const std::string& name, const ActionPtr& action) {
  struct NamedAction : Action {
    void run() override {
      const at::ThreadLocalStateGuard as_where_it_was_named(state);
      at::RecordFunction range(at::RecordScope::USER_SCOPE);
      range.before(name);
      action->run();
    }
    void join() override { action->join(); }
    void abort() override { action->abort(); }
    std::string name;
    ActionPtr action;
    at::ThreadLocalState state;
  };
  check(action != nullptr, "the action is None");
  auto shown = std::make_shared<NamedAction>();
  shown->name = name;
  shown->action = action;
  return shown;
}

}  // namespace

void bind_actions(py::module_& m) {
  py::class_<Action, ActionPtr> action(m, "Action");
  define(action, "run", of_held<Action>("the action", &Action::run), NoGil());
  define(action, "join", of_held<Action>("the action", &Action::join), NoGil());
  py::class_<pipeline::Exchange, Action, ExchangePtr> of_exchange(m, "Exchange");
  define(of_exchange, "begin", of_held<pipeline::Exchange>("the exchange", &pipeline::Exchange::begin), NoGil());
  define(of_exchange, "wait", of_held<pipeline::Exchange>("the exchange", pipeline::wait_for), NoGil());
  define(m, "exchange", exchange);
  define(m, "give_up_waits", pipeline::give_up_waits, NoGil());
  define(m, "copy_rows", copy_rows);
  define(m, "convert_chunks", convert_chunks);
  define(m, "sum_parts", sum_parts);
  define(m, "call_python", call_python);
  define(m, "named", named);
}

}  // namespace moe_opt
