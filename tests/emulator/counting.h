// What kernels cost, in numbers that no clock is needed for: launches, memsets, and 32-byte sectors of global memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace emulator::counting {

extern bool on;

void begin();
// One line for each launch and memset since begin(), in their order:
//   KERNEL blocks threads asked_read asked_written read written
//   memset bytes
// asked_*: sectors that the warps' accesses ask for, each access of a warp by itself; read, written: sectors of memory
// that the launch touches, each once.
std::string end();

void memset(size_t bytes);
void launch(const char* kernel, uint64_t blocks, size_t threads);
// An access of a thread, made at a place of the program; the n-th ones of a warp's threads at one place are one access.
void access(int thread, const void* site, uintptr_t address, size_t bytes, bool reads, bool writes);
void end_block();

}  // namespace emulator::counting
