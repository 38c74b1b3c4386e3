#include "pipeline/uncaught_exception.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <thread>

namespace moe_opt {
namespace {

constexpr std::chrono::milliseconds kPatience{8000}, kPoll{50};

std::terminate_handler end_process = nullptr;
struct sigaction when_aborted_before;
pid_t watched_process = 0;  // forked ones have the handlers too, and nobody who looks
std::atomic<bool> is_kept{false}, may_end{false};
char message[1024];  // not allocated: the heap may be what is broken

// Keeps what happened first, and waits for somebody to end the process: any thread, as several groups' watchdogs give
// up together, but not the first one again, whose std::terminate ends in abort().
void keep(const char* kind, const char* what) {
  static std::atomic<long> first_thread{0};
  const long own = syscall(SYS_gettid);
  if (getpid() != watched_process || first_thread == own) return;
  long nobody = 0;
  if (first_thread.compare_exchange_strong(nobody, own)) {
    std::snprintf(message, sizeof(message), "%s%s", kind, what);
    is_kept.store(true, std::memory_order_release);
  }
  for (auto waited = kPoll; waited < kPatience && !may_end; waited += kPoll) std::this_thread::sleep_for(kPoll);
}

void keep_exception() {
  try {
    if (const auto exception = std::current_exception()) std::rethrow_exception(exception);
    keep("std::terminate", "");
  } catch (const std::exception& error) {
    keep("an exception: ", error.what());
  } catch (...) {
    keep("an exception of an unknown type", "");
  }
  end_process();
}

// PyTorch's watchdogs call abort() without an exception: of a collective that did not end, or of one another.
void keep_abort(int number) {
  keep("SIGABRT, as NCCL's watchdog or a failed check raises", "");
  sigaction(number, &when_aborted_before, nullptr);
  raise(number);
}

}  // namespace

void keep_uncaught_exceptions() {
  static std::atomic_flag is_set = ATOMIC_FLAG_INIT;
  if (is_set.test_and_set()) return;
  watched_process = getpid();
  end_process = std::set_terminate(keep_exception);
  struct sigaction when_aborted = {};
  when_aborted.sa_handler = keep_abort;
  when_aborted.sa_flags = SA_NODEFER;  // for the handler that was there before, which is raised inside
  sigaction(SIGABRT, &when_aborted, &when_aborted_before);
}

void let_end() { may_end = true; }

std::string uncaught_exception() { return is_kept.load(std::memory_order_acquire) ? message : ""; }

}  // namespace moe_opt
