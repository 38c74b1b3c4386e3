#include "pipeline/uncaught_exception.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

namespace moe_opt {
namespace {

constexpr std::chrono::seconds kPatience{8};

std::terminate_handler end_process = nullptr;
std::atomic<bool> is_kept{false};
char message[1024];  // not allocated: the heap may be what is broken

void keep(const char* what) {
  static std::atomic_flag is_taken = ATOMIC_FLAG_INIT;
  if (is_taken.test_and_set()) return;
  std::strncpy(message, what, sizeof(message) - 1);
  is_kept.store(true, std::memory_order_release);
}

void keep_and_wait() {
  try {
    if (const auto exception = std::current_exception()) std::rethrow_exception(exception);
    keep("std::terminate");
  } catch (const std::exception& error) {
    keep(error.what());
  } catch (...) {
    keep("an exception of an unknown type");
  }
  std::this_thread::sleep_for(kPatience);
  end_process();
}

}  // namespace

void keep_uncaught_exceptions() {
  static std::atomic_flag is_set = ATOMIC_FLAG_INIT;
  if (!is_set.test_and_set()) end_process = std::set_terminate(keep_and_wait);
}

std::string uncaught_exception() { return is_kept.load(std::memory_order_acquire) ? message : ""; }

}  // namespace moe_opt
