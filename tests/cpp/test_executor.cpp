// The executor without Python or PyTorch: order inside lanes, waiting across lanes, failures, reuse, spans. Exits
// non-zero with one line for each failed expectation. tools/sanitize.sh runs it under ASan + UBSan and under TSan.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <random>
#include <thread>

#include "expect.h"
#include "pipeline/executor.h"

namespace {

using moe_opt::pipeline::Action;
using moe_opt::pipeline::Executor;
using moe_opt::pipeline::Op;
using moe_opt::pipeline::PeerError;
using moe_opt::pipeline::Span;

struct Function : Action {
  explicit Function(std::function<void()> function) : function(std::move(function)) {}
  void run() override { function(); }
  std::function<void()> function;
};

// Blocks until it is told to give up.
struct Blocked : Action {
  void run() override {
    while (!aborted) std::this_thread::yield();
    throw PeerError("given up", 3);
  }
  void abort() override { aborted = true; }
  std::atomic<bool> aborted{false};
};

constexpr int kLanes = 5;

// Every op adds up, without locks, what the ops it waits for have left: a race or a wrong order shows in the sums.
void test_random_graphs(Executor& executor) {
  std::mt19937 rng(7);
  for (int graph = 0; graph < 300; ++graph) {
    const int num_ops = 1 + static_cast<int>(rng() % 40);
    std::vector<int64_t> values(num_ops, 0), expected(num_ops, 0);
    std::vector<int> last(kLanes, -1);
    std::vector<Op> ops;
    for (int i = 0; i < num_ops; ++i) {
      Op op{static_cast<int>(rng() % kLanes), {}, {}};
      std::vector<int> inputs;
      if (last[op.lane] >= 0) inputs.push_back(last[op.lane]);  // the lane sees to that
      for (int k = static_cast<int>(rng() % 4); k > 0 && i > 0; --k) {
        op.waits_for.push_back(static_cast<int>(rng() % i));
        inputs.push_back(op.waits_for.back());
      }
      last[op.lane] = i;
      const bool slow = rng() % 8 == 0;
      expected[i] = 1;
      for (const int input : inputs) expected[i] += expected[input] % 1000;
      op.actions.push_back(std::make_shared<Function>([&values, i, inputs, slow] {
        if (slow) std::this_thread::sleep_for(std::chrono::microseconds(200));
        int64_t sum = 1;
        for (const int input : inputs) sum += values[input] % 1000;
        values[i] = sum;
      }));
      ops.push_back(op);
    }
    std::vector<Span> spans;
    const auto failure = executor.run(ops, static_cast<int>(rng() % kLanes), graph % 2 == 0 ? &spans : nullptr);
    expect(!failure, "a graph without failures");
    expect(values == expected, "values of a random graph");
    for (size_t i = 0; i < spans.size(); ++i) {
      for (const int other : ops[i].waits_for) expect(spans[other].end <= spans[i].start, "spans in order");
      expect(spans[i].start <= spans[i].end, "an op ends after it starts");
    }
  }
}

void test_failures(Executor& executor) {
  for (int round = 0; round < 50; ++round) {
    auto blocked = std::make_shared<Blocked>();
    auto ran_after = std::make_shared<std::atomic<int>>(0);
    const auto count = [ran_after] { ++*ran_after; };
    const std::vector<Op> ops = {
        {0, {}, {blocked}},
        {1, {}, {std::make_shared<Function>([] { throw PeerError("broken", 2); })}},
        {1, {}, {std::make_shared<Function>(count)}},
        {2, {0}, {std::make_shared<Function>(count)}},
    };
    const auto failure = executor.run(ops, round % 3, nullptr);
    expect(failure && failure->op == 1 && failure->peer == 2 && failure->reason == "broken", "the first failure");
    expect(*ran_after == 0, "nothing starts after a failure");
  }
}

// A failure in the middle of an op reaches lanes that wait for it, on the caller's thread or not.
void test_failures_wake_lanes_that_wait(Executor& executor) {
  for (int round = 0; round < 60; ++round) {
    const auto nothing = std::make_shared<Function>([] {});
    const auto failing = std::make_shared<Function>([round] {
      if (round % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      throw std::runtime_error("broken");
    });
    const std::vector<Op> ops = {{0, {}, {failing, nothing}}, {1, {0}, {nothing}}, {2, {1}, {nothing}}};
    const auto failure = executor.run(ops, round % 4, nullptr);
    expect(failure && failure->op == 0 && failure->reason == "broken", "the failure of an op with several actions");
  }
}

// Another thread ends a run whose ops wait for ever; the executor can be used again.
void test_runs_are_given_up(Executor& executor) {
  executor.give_up();  // nothing is under way
  for (int round = 0; round < 20; ++round) {
    auto blocked = std::make_shared<Blocked>();
    auto ran_after = std::make_shared<std::atomic<int>>(0);
    const auto count = std::make_shared<Function>([ran_after] { ++*ran_after; });
    const std::vector<Op> ops = {{0, {}, {blocked}}, {1, {0}, {count}}, {2, {}, {std::make_shared<Function>([] {})}}};
    std::atomic<bool> returned{false};
    std::thread other([&] {
      while (!returned) executor.give_up();
    });
    const auto failure = executor.run(ops, round % 3, nullptr);
    returned = true;
    other.join();
    expect(failure && failure->peer == -1 && failure->reason == "given up", "a run that is given up");
    expect(*ran_after == 0, "nothing starts after a run was given up");
    expect(!executor.run({{0, {}, {count}}, {1, {0}, {count}}}, 0, nullptr), "a run after it");
  }
}

void test_refusals(Executor& executor) {
  for (const std::vector<Op>& ops : {std::vector<Op>{{kLanes, {}, {}}},
                                     {{-1, {}, {}}},
                                     {{0, {0}, {}}},
                                     {{0, {}, {}}, {0, {2}, {}}},
                                     {{0, {-1}, {}}}}) {
    bool refused = false;
    try {
      executor.run(ops, 0, nullptr);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    expect(refused, "an impossible program is refused");
  }
  expect(!executor.run({}, 0, nullptr), "an empty program");
}

// Several threads share one executor: their runs take turns.
void test_callers_take_turns(Executor& executor) {
  int running = 0;  // without a lock: only one run at a time may touch it
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        const auto touch = std::make_shared<Function>([&running] { ++running; });
        executor.run({{0, {}, {touch}}, {1, {0}, {touch}}, {2, {1}, {touch}}}, 2, nullptr);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  expect(running == 600, "every op of every caller");
}

// An op that runs its own executor, from whichever lane and through another executor or not, fails: it would wait for
// itself.
void test_reentry(Executor& executor) {
  Executor other(kLanes);
  const auto run = [](Executor& inner, int op_lane, int caller_lane, const std::function<void()>& function) {
    return inner.run({{op_lane, {}, {std::make_shared<Function>(function)}}}, caller_lane, nullptr);
  };
  const auto nothing = [] {};
  for (int lane = 0; lane < 2; ++lane) {  // the caller's, another thread's
    const auto direct = run(executor, lane, 0, [&] { run(executor, 1, 0, nothing); });
    expect(direct && direct->reason.find("would wait for itself") != std::string::npos, "an op runs its own executor");
    std::optional<moe_opt::pipeline::Failure> inner;
    const auto through =
        run(executor, lane, 0, [&] { inner = run(other, 1, 0, [&] { run(executor, 1, 0, nothing); }); });
    expect(!through && inner && inner->reason.find("would wait for itself") != std::string::npos,
           "an op runs its own executor through another one");
    expect(!run(executor, lane, 0, nothing), "a run after one that was refused");
  }
}

// A child has the executor, but not its threads: it makes new ones, and ends.
void test_fork(Executor& executor) {
#if defined(__SANITIZE_THREAD__)
  return;  // ThreadSanitizer allows no thread after the fork of a process that has several
#endif
  const auto use = [&executor] {
    std::atomic<int> ran{0};
    const auto count = std::make_shared<Function>([&ran] { ++ran; });
    const auto failure = executor.run({{0, {}, {count}}, {1, {0}, {count}}, {2, {1}, {count}}}, 0, nullptr);
    return !failure && ran == 3;
  };
  expect(use(), "the executor before the fork");
  const pid_t child = fork();
  if (child == 0) {
    alarm(120);  // a child that waits for ever ends by a signal
    const bool right = use() && use();
    const pid_t grandchild = fork();
    executor.~Executor();  // here with threads of its own; in the grandchild with nobody's
    int status = 0;
    if (grandchild != 0) waitpid(grandchild, &status, 0);
    _exit(right && status == 0 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  expect(status == 0, "the executor in a forked process");
  expect(use(), "the executor after the fork");
}

}  // namespace

int main() {
  for (int life = 0; life < 3; ++life) {
    Executor executor(kLanes);
    test_random_graphs(executor);
    test_failures(executor);
    test_failures_wake_lanes_that_wait(executor);
    test_runs_are_given_up(executor);
    test_refusals(executor);
    test_callers_take_turns(executor);
    test_reentry(executor);
    test_fork(executor);
  }
  return exit_status("executor");
}
