#include "pipeline/uncaught_exception.h"

#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <thread>

namespace moe_opt {
namespace {

constexpr std::chrono::seconds kPatience{8};

std::terminate_handler end_process = nullptr;
struct sigaction when_aborted_before;
std::atomic<bool> is_kept{false};
char message[1024];  // not allocated: the heap may be what is broken

// Keeps what happened first, and waits for somebody to end the process: each thread once, as several groups' watchdogs
// give up together, and std::terminate ends in abort().
void keep(const char* kind, const char* what) {
  static std::atomic_flag is_taken = ATOMIC_FLAG_INIT;
  thread_local bool has_waited = false;
  if (has_waited) return;
  has_waited = true;
  if (!is_taken.test_and_set()) {
    std::snprintf(message, sizeof(message), "%s%s", kind, what);
    is_kept.store(true, std::memory_order_release);
  }
  std::this_thread::sleep_for(kPatience);
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
  end_process = std::set_terminate(keep_exception);
  struct sigaction when_aborted = {};
  when_aborted.sa_handler = keep_abort;
  when_aborted.sa_flags = SA_NODEFER;  // for the handler that was there before, which is raised inside
  sigaction(SIGABRT, &when_aborted, &when_aborted_before);
}

std::string uncaught_exception() { return is_kept.load(std::memory_order_acquire) ? message : ""; }

}  // namespace moe_opt
