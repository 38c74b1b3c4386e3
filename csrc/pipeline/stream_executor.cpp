#include "stream_executor.h"

#include <algorithm>
#include <string>

namespace moe_opt {
namespace pipeline {

// One run.
class StreamExecutor::Issue {
 public:
  Issue(StreamExecutor& executor, const std::vector<Op>& ops, int caller_lane, bool timed)
      : executor_(executor),
        outer_(executor.issue_),
        streams_(*executor.streams_),
        ops_(ops),
        caller_lane_(caller_lane),
        caller_(streams_.current()),
        begin_(streams_.record(caller_, timed)),
        timed_(timed),
        last_op_(streams_.num_lanes(), -1),
        issued_(ops.size()),
        start_(ops.size()),
        end_(ops.size()) {
    executor_.issue_ = this;
  }
  ~Issue() { executor_.issue_ = outer_; }
  Issue(const Issue&) = delete;
  Issue& operator=(const Issue&) = delete;

  std::optional<Failure> issue_all() {
    issue_until(ops_.size());
    std::vector<int> last;
    for (const int op : last_op_) {
      if (op >= 0) last.push_back(op);
    }
    if (timed_) {
      for (const int op : last) end(op);  // before the caller's stream waits for anybody
      for (const int op : last) streams_.wait(caller_, *end_[op]);
    } else {
      for (const int op : last) follow(caller_, op);
    }
    return failure_;
  }

  void issue_meanwhile() { issue_until(halfway_until_); }

  std::vector<Span> spans() {
    streams_.synchronize(caller_);
    std::vector<Span> spans(ops_.size());
    for (size_t i = 0; i < ops_.size(); ++i) {
      if (!end_[i]) continue;
      spans[i] = {streams_.seconds(*begin_, *start_[i]), streams_.seconds(*begin_, *end_[i])};
      // The host notes ends late; an op that another has waited for had ended when that one began.
      for (const int other : ops_[i].waits_for) spans[other].end = std::min(spans[other].end, spans[i].start);
    }
    return spans;
  }

 private:
  void issue_until(size_t end) {
    while (next_ < end && !failure_) issue(static_cast<int>(next_++));
  }

  void issue(int i) {
    const Op& op = ops_[i];
    halfway_until_ = next_ + op.meanwhile;
    const Stream stream = stream_of(op.lane);
    int& last = last_op_[op.lane];
    if (last >= 0) {
      timed_ ? end(last) : join(stream, last);
    } else if (op.lane != caller_lane_) {
      streams_.wait(stream, *begin_);
    }
    for (const int other : op.waits_for) {
      if (ops_[other].lane != op.lane) follow(stream, other);
    }
    if (timed_) start_[i] = streams_.record(stream, true);
    for (size_t action = 0; action < op.actions.size() && !failure_; ++action) {
      if (action > 0) attempt(i, [&] { streams_.join(stream, *op.actions[action - 1]); });
      attempt(i, [&] { streams_.enqueue(stream, *op.actions[action]); });
    }
    issued_[i] = streams_.record(stream, false);
    last = i;
  }

  // The stream waits for an op: for what it has queued, and for what it has left running.
  void follow(Stream stream, int i) {
    streams_.wait(stream, *issued_[i]);
    join(stream, i);
  }

  void join(Stream stream, int i) {
    if (ops_[i].actions.empty()) return;
    attempt(i, [&] { streams_.join(stream, *ops_[i].actions.back()); });
  }

  // Notes when the op that was last in its lane ends, on its own stream.
  void end(int i) {
    const Stream stream = stream_of(ops_[i].lane);
    join(stream, i);
    end_[i] = streams_.record(stream, true);
  }

  Stream stream_of(int lane) { return lane == caller_lane_ ? caller_ : streams_.of_lane(lane); }

  // The first failure counts; the others are its consequences.
  template <typename Function>
  void attempt(int i, const Function& function) {
    const std::optional<Failure> failure = failure_of(i, function);
    if (!failure_) failure_ = failure;
  }

  StreamExecutor& executor_;
  Issue* const outer_;  // of a thread that waits for this one, as autograd's may
  Streams& streams_;
  const std::vector<Op>& ops_;
  const int caller_lane_;
  const Stream caller_;
  const std::unique_ptr<Event> begin_;
  const bool timed_;
  size_t next_ = 0;                             // the op that comes next
  size_t halfway_until_ = 0;                    // the op behind those that are issued halfway through the last one
  std::vector<int> last_op_;                    // of each lane, -1: none yet
  std::vector<std::unique_ptr<Event>> issued_;  // of each op: behind what it has queued on its stream
  std::vector<std::unique_ptr<Event>> start_, end_;
  std::optional<Failure> failure_;
};

std::optional<Failure> StreamExecutor::run(const std::vector<Op>& ops, int caller_lane, std::vector<Span>* spans) {
  check_ops(ops, streams_->num_lanes());
  Inside::refuse(this);
  const Inside inside(this);
  Issue issue(*this, ops, caller_lane, spans != nullptr);
  const std::optional<Failure> failure = issue.issue_all();
  if (spans != nullptr) *spans = issue.spans();
  return failure;
}

void StreamExecutor::issue_meanwhile() {
  if (issue_ != nullptr) issue_->issue_meanwhile();
}

}  // namespace pipeline
}  // namespace moe_opt
