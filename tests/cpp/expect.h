// What the tests of this folder expect: one line for each failed expectation (the first 20), and the exit status.
#pragma once

#include <atomic>
#include <cstdio>

inline std::atomic<int> failures{0};

// `where` says which of several similar cases it was; "" where there is one.
inline void expect(bool ok, const char* what, const char* where = "") {
  if (!ok && failures++ < 20) std::printf("FAILED [%s] %s\n", where, what);
}

// For main() to return.
inline int exit_status(const char* tests) {
  if (failures == 0) std::printf("all %s tests passed\n", tests);
  return failures == 0 ? 0 : 1;
}
