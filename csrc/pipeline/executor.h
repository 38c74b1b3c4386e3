// Runs the ops of a schedule: each lane in order, different lanes side by side. Plain C++, no framework in here.
//
// On a CPU every lane is a thread that lives as long as the executor; the thread that calls run() is one of the lanes.
// An op that fails stops all lanes: ops that have not started never start, and those that wait for other ranks are
// told to give up. run() returns when no op is running any more, and the executor can be used again. A process group on
// which an exchange failed cannot, and Gloo's are refused (exchange.cpp): what its ranks have sent and posted no longer
// fits together.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace moe_opt {
namespace pipeline {

// One thing an op does. An action belongs to one op of one run.
class Action {
 public:
  virtual ~Action() = default;
  virtual void run() = 0;
  // Makes the current stream of an accelerator wait for what run() has left running on others; on a host, the caller.
  virtual void join() {}
  // Makes a run() that blocks, in another thread, throw soon; or one that has not begun, once it begins.
  virtual void abort() {}
};

struct Op {
  int lane;                                      // 0 <= lane < number of lanes
  std::vector<int> waits_for;                    // earlier ops
  std::vector<std::shared_ptr<Action>> actions;  // one after another
  int meanwhile = 0;                             // the ops behind it that a stream executor issues halfway through it
};

// What a lane says when an action throws. `peer`: the rank of the group that failed, -1 if unknown.
struct PeerError : std::runtime_error {
  PeerError(const std::string& reason, int peer) : std::runtime_error(reason), peer(peer) {}
  int peer;
};

struct Failure {
  int op;
  int peer;
  std::string reason;
};

// The failure of an op, if body() throws.
template <typename Body>
std::optional<Failure> failure_of(int op, const Body& body) {
  try {
    body();
  } catch (const PeerError& error) {
    return Failure{op, error.peer, error.what()};
  } catch (const std::exception& error) {
    return Failure{op, -1, error.what()};
  }
  return std::nullopt;
}

// Start and end of an op in seconds since run() was called.
struct Span {
  double start;
  double end;
};

// An executor that this thread is inside of: it runs the executor's actions, or those of another one that such an
// action has run, on whichever thread. Scoped; `outer` is what the thread that called run() is inside of.
class Inside {
 public:
  explicit Inside(const void* executor, const Inside* outer = innermost());
  ~Inside();
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

  // Of this thread, or null.
  static const Inside* innermost();
  // Throws std::logic_error if this thread is inside of the executor: a run would wait for the action it is part of.
  static void refuse(const void* executor);

 private:
  const void* executor_;
  const Inside* outer_;
  const Inside* before_;
};

class Executor {
 public:
  explicit Executor(int num_lanes);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Runs all ops and returns the first failure, if any. The calling thread takes the ops of `caller_lane`. `spans` may
  // be null. Throws std::invalid_argument for an op that waits for itself or a later one, or in an unknown lane, and
  // std::logic_error where an action of the executor runs it. One run at a time: a second caller waits for the first.
  std::optional<Failure> run(const std::vector<Op>& ops, int caller_lane, std::vector<Span>* spans);

  // Has the run that another thread is in, if any, fail: with the first op under way, and no peer. To be called until
  // that thread has returned: it may be about to begin another run.
  void give_up();

 private:
  struct Run;
  struct Lanes;
  Lanes& lanes();

  const int num_lanes_;
  std::unique_ptr<Lanes> lanes_;
  std::atomic<int> process_;  // that has the threads of lanes_: they do not outlive a fork
};

// Throws std::invalid_argument for ops that no executor can run: see Executor::run. What is issued halfway through an
// op is in other lanes, and does not wait for it.
void check_ops(const std::vector<Op>& ops, int num_lanes);

}  // namespace pipeline
}  // namespace moe_opt
