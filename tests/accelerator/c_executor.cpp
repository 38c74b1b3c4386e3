// The stream executor behind a C interface, for streams that are functions of whoever calls: see executor_library.py.

#include <cstring>
#include <memory>
#include <string>

#include "stream_executor.h"

namespace {

using namespace moe_opt::pipeline;  // NOLINT

struct Functions {
  int64_t (*current)();
  int (*record)(int64_t stream, int timed);
  void (*wait)(int64_t stream, int event);
  int (*enqueue)(int64_t stream, int op, int action);  // 0: it failed
  void (*join)(int64_t stream, int op, int action);
  void (*synchronize)(int64_t stream);
  double (*seconds)(int from, int to);
};

struct NumberedEvent : Event {
  explicit NumberedEvent(int number) : number(number) {}
  int number;
};

int number_of(const Event& event) { return static_cast<const NumberedEvent&>(event).number; }

struct NumberedAction : Action {
  NumberedAction(int op, int number) : op(op), number(number) {}
  void run() override {}
  int op, number;
};

class CalledStreams : public Streams {
 public:
  CalledStreams(const Functions& functions, int num_lanes) : functions_(functions), num_lanes_(num_lanes) {}

  int num_lanes() const override { return num_lanes_; }
  Stream of_lane(int lane) override { return lane; }
  Stream current() override { return functions_.current(); }
  std::unique_ptr<Event> record(Stream stream, bool timed) override {
    return std::make_unique<NumberedEvent>(functions_.record(stream, timed));
  }
  void wait(Stream stream, const Event& event) override { functions_.wait(stream, number_of(event)); }
  void enqueue(Stream stream, Action& action) override {
    const auto& numbered = static_cast<NumberedAction&>(action);
    if (functions_.enqueue(stream, numbered.op, numbered.number) == 0) throw PeerError("refused", 7);
  }
  void join(Stream stream, Action& action) override {
    const auto& numbered = static_cast<NumberedAction&>(action);
    functions_.join(stream, numbered.op, numbered.number);
  }
  void synchronize(Stream stream) override { functions_.synchronize(stream); }
  double seconds(const Event& from, const Event& to) override {
    return functions_.seconds(number_of(from), number_of(to));
  }

 private:
  const Functions functions_;
  const int num_lanes_;
};

StreamExecutor* running = nullptr;  // for whichever thread

// What runs as long as this lives.
struct Running {
  explicit Running(StreamExecutor* executor) : before(running) { running = executor; }
  ~Running() { running = before; }
  StreamExecutor* before;
};

}  // namespace

// As StreamExecutor's, of the run under way.
extern "C" __attribute__((visibility("default"))) void issue_meanwhile() {
  if (running != nullptr) running->issue_meanwhile();
}

// Runs ops on lanes 0 to num_lanes - 1; waits holds those of all ops one after another. Returns -1, or the op that
// failed, or -2 where the ops are refused; `reason` then says why. `spans`, of two numbers an op, may be null.
extern "C" __attribute__((visibility("default"))) int run_on_streams(
    const Functions* functions, int num_lanes, int num_ops, const int* lane_of, const int* num_waits, const int* waits,
    const int* num_actions, const int* meanwhile, int caller_lane, double* spans, char* reason, int reason_size) {
  std::vector<Op> ops;
  for (int i = 0; i < num_ops; ++i) {
    Op op{lane_of[i], std::vector<int>(waits, waits + num_waits[i]), {}, meanwhile[i]};
    waits += num_waits[i];
    for (int action = 0; action < num_actions[i]; ++action) {
      op.actions.push_back(std::make_shared<NumberedAction>(i, action));
    }
    ops.push_back(op);
  }
  const auto say = [&](const std::string& text) { std::strncpy(reason, text.c_str(), reason_size - 1); };
  try {
    StreamExecutor executor(std::make_unique<CalledStreams>(*functions, num_lanes));
    const Running this_one(&executor);
    std::vector<Span> times;
    const auto failure = executor.run(ops, caller_lane, spans == nullptr ? nullptr : &times);
    for (size_t i = 0; i < times.size(); ++i) spans[2 * i] = times[i].start, spans[2 * i + 1] = times[i].end;
    if (!failure) return -1;
    say(failure->reason);
    return failure->op;
  } catch (const std::exception& error) {
    say(error.what());
    return -2;
  }
}
