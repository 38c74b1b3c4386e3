#include "pipeline/executor.h"

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/module.h"
#ifdef MOE_OPT_CUDA
#include "pipeline/cuda_streams.h"
#include "pipeline/stream_executor.h"
#endif

namespace moe_opt {
namespace {

using ActionPtr = std::shared_ptr<pipeline::Action>;

constexpr int64_t kMostLanes = 64;

// (lane, ops it waits for, actions, ops that are issued halfway through it)
using OpTuple = std::tuple<int, std::vector<int>, std::vector<ActionPtr>, int>;
using FailureTuple = std::tuple<int, int, std::string>;  // op, peer, reason
using SpanTuples = std::vector<std::pair<double, double>>;

template <typename Runner>
std::pair<std::optional<FailureTuple>, SpanTuples> run_ops(const std::shared_ptr<Runner>& runner,
                                                           const std::vector<OpTuple>& tuples, int caller_lane,
                                                           bool record) {
  check(runner != nullptr, "the executor is None");
  std::vector<pipeline::Op> ops;
  ops.reserve(tuples.size());
  for (const auto& [lane, waits_for, actions, meanwhile] : tuples) {
    for (const ActionPtr& action : actions) check(action != nullptr, "an op's action is None");
    ops.push_back({lane, waits_for, actions, meanwhile});
  }
  std::vector<pipeline::Span> spans;
  std::optional<pipeline::Failure> failure;
  {
    py::gil_scoped_release no_gil;
    failure = runner->run(ops, caller_lane, record ? &spans : nullptr);
  }
  std::optional<FailureTuple> failed;
  if (failure) failed = {failure->op, failure->peer, failure->reason};
  SpanTuples times;
  for (const pipeline::Span& span : spans) times.emplace_back(span.start, span.end);
  return {failed, times};
}

}  // namespace

void bind_executor(py::module_& m) {
  py::class_<pipeline::Executor, std::shared_ptr<pipeline::Executor>> executor(m, "Executor");
  executor.def(py::init([](Size<"the number of lanes"> lanes) {
    check(lanes <= kMostLanes, lanes, " lanes: at most ", kMostLanes);
    return std::make_shared<pipeline::Executor>(static_cast<int>(lanes));
  }));
  define(executor, "run", run_ops<pipeline::Executor>);
  define(executor, "give_up", of_held<pipeline::Executor>("the executor", &pipeline::Executor::give_up), NoGil());
#ifdef MOE_OPT_CUDA
  py::class_<pipeline::StreamExecutor, std::shared_ptr<pipeline::StreamExecutor>> on_streams(m, "StreamExecutor");
  on_streams.def(py::init([](const std::vector<int>& priorities) {
    return std::make_shared<pipeline::StreamExecutor>(pipeline::cuda_streams(priorities));
  }));
  define(on_streams, "run", run_ops<pipeline::StreamExecutor>);
  define(on_streams, "issue_meanwhile",
         of_held<pipeline::StreamExecutor>("the executor", &pipeline::StreamExecutor::issue_meanwhile), NoGil());
  define(m, "new_cuda_stream",
         [](int priority) { return reinterpret_cast<intptr_t>(pipeline::new_cuda_stream(priority)); });
#endif
}

}  // namespace moe_opt
