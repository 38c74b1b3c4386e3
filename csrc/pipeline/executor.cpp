#include "executor.h"

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
  int lanes_left = 0;            // that have not finished, the caller's aside
  std::optional<Failure> failure;

  double now() const { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  bool ready(const Op& op) const {
    for (const int other : op.waits_for) {
      if (!done[other]) return false;
    }
    return true;
  }

  void fail(int op, const PeerError& error) {
    if (failure) return;  // the first one counts; the others are its consequences
    failure = Failure{op, error.peer, error.what()};
    for (Action* action : running) {
      if (action != nullptr) action->abort();
    }
  }
};

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
  }
}

Executor::Executor(int num_lanes) : assigned_(num_lanes, nullptr), threads_(num_lanes) {}

Executor::~Executor() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

std::optional<Failure> Executor::run(const std::vector<Op>& ops, int caller_lane, std::vector<Span>* spans) {
  const int num_lanes = static_cast<int>(threads_.size());
  check_ops(ops, num_lanes);
  if (spans != nullptr) spans->assign(ops.size(), Span{});
  std::lock_guard<std::mutex> one_run(one_run_);
  std::unique_lock<std::mutex> lock(mutex_);
  for (const Op& op : ops) {  // before any lane is given work: a thread may fail to start
    if (op.lane != caller_lane && !threads_[op.lane].joinable()) {
      threads_[op.lane] = std::thread(&Executor::work, this, op.lane);
    }
  }
  Run run{ops, spans, Clock::now(), std::vector<bool>(ops.size()), std::vector<Action*>(num_lanes), 0, std::nullopt};
  for (const Op& op : ops) {
    if (op.lane == caller_lane || assigned_[op.lane] != nullptr) continue;
    assigned_[op.lane] = &run;
    ++run.lanes_left;
  }
  if (run.lanes_left > 0) changed_.notify_all();
  run_lane(run, caller_lane, lock);
  changed_.wait(lock, [&] { return run.lanes_left == 0; });
  return run.failure;
}

// Body of a lane's thread.
void Executor::work(int lane) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || assigned_[lane] != nullptr; });
    if (stopping_) return;
    Run& run = *assigned_[lane];
    assigned_[lane] = nullptr;
    run_lane(run, lane, lock);
    if (--run.lanes_left == 0) changed_.notify_all();
  }
}

void Executor::run_lane(Run& run, int lane, std::unique_lock<std::mutex>& lock) {
  for (size_t i = 0; i < run.ops.size(); ++i) {
    const Op& op = run.ops[i];
    if (op.lane != lane) continue;
    changed_.wait(lock, [&] { return run.failure || run.ready(op); });
    if (run.spans != nullptr) (*run.spans)[i].start = run.now();
    for (const auto& action : op.actions) {
      if (run.failure) return;
      run.running[lane] = action.get();
      lock.unlock();
      std::optional<PeerError> error;
      try {
        action->run();
      } catch (const PeerError& caught) {
        error = caught;
      } catch (const std::exception& caught) {
        error = PeerError(caught.what(), -1);
      }
      lock.lock();
      run.running[lane] = nullptr;
      if (error) {
        run.fail(static_cast<int>(i), *error);
        changed_.notify_all();  // lanes that wait for an op need not wait any longer
      }
    }
    if (run.spans != nullptr) (*run.spans)[i].end = run.now();
    run.done[i] = true;
    changed_.notify_all();
  }
}

}  // namespace pipeline
}  // namespace moe_opt
