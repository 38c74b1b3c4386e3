#include "executor.h"

#include <unistd.h>

#include <algorithm>

namespace moe_opt {
namespace pipeline {

using Clock = std::chrono::steady_clock;

// One run, shared by its lanes and guarded by the executor's mutex.
struct Executor::Run {
  const std::vector<Op>& ops;
  std::vector<Span>* spans;
  Clock::time_point begin;
  std::vector<bool> done;
  std::vector<Action*> running;  // of each lane, null between actions
  std::vector<int> next;         // of each lane, the op that it waits to begin, or -1
  int lanes_left = 0;            // that have not finished, the caller's aside
  std::optional<Failure> failure;
  const Inside* outer;  // what the thread that called run() is inside of

  double now() const { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  bool ready(const Op& op) const {
    for (const int other : op.waits_for) {
      if (!done[other]) return false;
    }
    return true;
  }

  void fail(const Failure& of_op) {
    if (failure) return;  // the first one counts; the others are its consequences
    failure = of_op;
    abort_running();
  }

  void give_up() {
    for (int op = 0; op < static_cast<int>(ops.size()) && !failure; ++op) {
      if (!done[op] && running[ops[op].lane] != nullptr) failure = Failure{op, -1, "given up"};
    }
    if (failure) abort_running();
  }

  void abort_running() {
    for (Action* action : running) {
      if (action != nullptr) action->abort();
    }
  }
};

namespace {

void check_meanwhile(const std::vector<Op>& ops, int i) {
  const int meanwhile = ops[i].meanwhile, behind = static_cast<int>(ops.size()) - i - 1;
  if (meanwhile < 0 || meanwhile > behind) {
    throw std::invalid_argument(std::to_string(meanwhile) + " ops are to be issued halfway through op " +
                                std::to_string(i) + ", which has " + std::to_string(behind) + " behind it");
  }
  for (int other = i + 1; other <= i + meanwhile; ++other) {
    const std::vector<int>& before = ops[other].waits_for;
    if (ops[other].lane == ops[i].lane || ops[other].meanwhile > 0 ||
        std::find(before.begin(), before.end(), i) != before.end()) {
      throw std::invalid_argument("op " + std::to_string(other) + " cannot be issued halfway through op " +
                                  std::to_string(i) + ": it is in its lane, waits for it or is halved itself");
    }
  }
}

}  // namespace

void check_ops(const std::vector<Op>& ops, int num_lanes) {
  for (int i = 0; i < static_cast<int>(ops.size()); ++i) {
    if (ops[i].lane < 0 || ops[i].lane >= num_lanes) {
      throw std::invalid_argument("op " + std::to_string(i) + " is in lane " + std::to_string(ops[i].lane) +
                                  ", but there are " + std::to_string(num_lanes) + " lanes");
    }
    for (const int other : ops[i].waits_for) {
      if (other < 0 || other >= i) {
        throw std::invalid_argument("op " + std::to_string(i) + " waits for op " + std::to_string(other) +
                                    ", which does not come before it");
      }
    }
    check_meanwhile(ops, i);
  }
}

namespace {

thread_local const Inside* innermost_of_thread = nullptr;

}  // namespace

Inside::Inside(const void* executor, const Inside* outer)
    : executor_(executor), outer_(outer), before_(innermost_of_thread) {
  innermost_of_thread = this;
}

Inside::~Inside() { innermost_of_thread = before_; }

const Inside* Inside::innermost() { return innermost_of_thread; }

void Inside::refuse(const void* executor) {
  for (const Inside* inside = innermost_of_thread; inside != nullptr; inside = inside->outer_) {
    if (inside->executor_ == executor) {
      throw std::logic_error(
          "an op runs a schedule on the executor that it is an op of, which would wait for itself: run it before or "
          "after the schedule that is under way");
    }
  }
}

// The threads of an executor, and what they share.
struct Executor::Lanes {
  explicit Lanes(const Executor* executor, int num_lanes)
      : executor(executor), changed(num_lanes), assigned(num_lanes, nullptr), threads(num_lanes) {}
  ~Lanes();

  void work(int lane);
  void run_lane(Run& run, int lane, std::unique_lock<std::mutex>& lock);
  void wake(int lane) { changed[lane].notify_all(); }
  void wake_all();
  void wake_ready(const Run& run);

  const Executor* executor;
  std::mutex one_run;
  std::mutex mutex;  // guards all below, and the state of a run
  // Of each lane, for its thread and for a caller that has taken its ops. Only who has something to do is woken: on few
  // cores a thread that wakes up in vain keeps another one from its work.
  std::vector<std::condition_variable> changed;
  std::condition_variable ended;  // for the caller
  Run* under_way = nullptr;
  std::vector<Run*> assigned;  // the run that a lane's thread has yet to take up, or null
  std::vector<std::thread> threads;
  bool stopping = false;
};

Executor::Lanes::~Lanes() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    stopping = true;
  }
  wake_all();
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
}

void Executor::Lanes::wake_all() {
  for (std::condition_variable& of_lane : changed) of_lane.notify_all();
}

// Wakes the lanes whose next op has nothing to wait for any more.
void Executor::Lanes::wake_ready(const Run& run) {
  for (size_t lane = 0; lane < changed.size(); ++lane) {
    if (run.next[lane] >= 0 && run.ready(run.ops[run.next[lane]])) wake(static_cast<int>(lane));
  }
}

// Body of a lane's thread.
void Executor::Lanes::work(int lane) {
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    changed[lane].wait(lock, [&] { return stopping || assigned[lane] != nullptr; });
    if (stopping) return;
    Run& run = *assigned[lane];
    assigned[lane] = nullptr;
    run_lane(run, lane, lock);
    if (--run.lanes_left == 0) ended.notify_all();
  }
}

void Executor::Lanes::run_lane(Run& run, int lane, std::unique_lock<std::mutex>& lock) {
  const Inside inside(executor, run.outer);
  for (size_t i = 0; i < run.ops.size(); ++i) {
    const Op& op = run.ops[i];
    if (op.lane != lane) continue;
    run.next[lane] = static_cast<int>(i);
    changed[lane].wait(lock, [&] { return run.failure || run.ready(op); });
    run.next[lane] = -1;
    if (run.spans != nullptr) (*run.spans)[i].start = run.now();
    for (const auto& action : op.actions) {
      if (run.failure) return;
      run.running[lane] = action.get();
      lock.unlock();
      const std::optional<Failure> failure = failure_of(static_cast<int>(i), [&] {
        action->run();
        action->join();  // on a host nothing orders what is left running before the next op
      });
      lock.lock();
      run.running[lane] = nullptr;
      if (failure) {
        run.fail(*failure);
        wake_all();  // lanes that wait for an op need not wait any longer
      }
    }
    if (run.spans != nullptr) (*run.spans)[i].end = run.now();
    run.done[i] = true;
    wake_ready(run);
  }
}

Executor::Executor(int num_lanes)
    : num_lanes_(num_lanes), lanes_(std::make_unique<Lanes>(this, num_lanes)), process_(getpid()) {}

Executor::~Executor() {
  if (process_ != getpid()) lanes_.release();
}

// Those of this process. A forked one has neither the threads of the other, which it cannot join, nor what they held:
// what is left of them is never touched again, and new ones take their place.
Executor::Lanes& Executor::lanes() {
  static std::mutex several_callers;
  if (process_ == getpid()) return *lanes_;
  std::lock_guard<std::mutex> lock(several_callers);
  if (process_ != getpid()) {
    lanes_.release();
    lanes_ = std::make_unique<Lanes>(this, num_lanes_);
    process_ = getpid();
  }
  return *lanes_;
}

std::optional<Failure> Executor::run(const std::vector<Op>& ops, int caller_lane, std::vector<Span>* spans) {
  check_ops(ops, num_lanes_);
  Inside::refuse(this);
  if (spans != nullptr) spans->assign(ops.size(), Span{});
  Lanes& lanes = this->lanes();
  std::lock_guard<std::mutex> one_run(lanes.one_run);
  std::unique_lock<std::mutex> lock(lanes.mutex);
  for (const Op& op : ops) {  // before any lane is given work: a thread may fail to start
    if (op.lane != caller_lane && !lanes.threads[op.lane].joinable()) {
      lanes.threads[op.lane] = std::thread(&Lanes::work, &lanes, op.lane);
    }
  }
  Run run{ops,
          spans,
          Clock::now(),
          std::vector<bool>(ops.size()),
          std::vector<Action*>(num_lanes_),
          std::vector<int>(num_lanes_, -1),
          0,
          std::nullopt,
          Inside::innermost()};
  lanes.under_way = &run;
  for (const Op& op : ops) {
    if (op.lane == caller_lane || lanes.assigned[op.lane] != nullptr) continue;
    lanes.assigned[op.lane] = &run;
    ++run.lanes_left;
    lanes.wake(op.lane);
  }
  lanes.run_lane(run, caller_lane, lock);
  lanes.ended.wait(lock, [&] { return run.lanes_left == 0; });
  lanes.under_way = nullptr;
  return run.failure;
}

void Executor::give_up() {
  Lanes& lanes = this->lanes();
  std::lock_guard<std::mutex> lock(lanes.mutex);
  if (lanes.under_way == nullptr) return;
  lanes.under_way->give_up();
  lanes.wake_all();
}

}  // namespace pipeline
}  // namespace moe_opt
