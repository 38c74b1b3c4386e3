// A CUDA device in software: runs kernels on the host's processor, and looks at every access to memory.
//
// A block's threads are fibers of one thread of the host. They run in a random order, and may be stopped at any access
// to memory; the blocks of a launch run one after the other, in a random order too. Barriers, warp collectives and
// atomics mean what they mean on the device. Each byte of device memory (and of shared memory) has two tags: who wrote
// it last and who read it last. An access outside of an allocation, to memory that nobody has written, at an address
// that is no multiple of its size, or to what another thread touches without a barrier in between, stops the launch
// with one sentence. What it cannot show is listed in docs/cuda-kernels.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

namespace emulator {

// ---- Memory ----

// Device memory, aligned to 512 bytes, between bytes that nobody may touch. Allocations of kSparseBytes and more are
// made of pages that exist once they are written; unlike others, they begin as zeros that may be read.
constexpr size_t kSparseBytes = size_t{256} << 20;
void* allocate(size_t bytes);
void release(void* data);
size_t allocated();       // bytes now
size_t most_allocated();  // since the start, or since it was reset
void reset_most_allocated();
bool is_device(const void* data);

// What is not a kernel (a memset, PyTorch's own operations) reads or writes device memory. host_reads throws where
// a byte has never been written. What host_forgets was given counts as never written.
void host_writes(const void* data, size_t bytes);
void host_reads(const void* data, size_t bytes, const char* what);
void host_forgets(const void* data, size_t bytes);
bool nobody_wrote(const void* data, size_t bytes);

// ---- Launches ----

struct Dim3 {
  unsigned x, y, z;
  constexpr Dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// The seed of every order that is drawn from now on.
void set_seed(uint64_t seed);
// Whether races are let pass, for kernels that have one on purpose.
void allow_races(bool allow);
// Launches since the process began.
int64_t launches();
// That the device says it has, by which launchers size their grids; 132, as an H100, unless a test sets it.
extern int multiprocessors;

struct Configuration {
  const char* kernel;
  int most_threads;  // of a block, as __launch_bounds__ says
  Dim3 grid, block;
  size_t shared_bytes;  // dynamic
  const void* function;
};
// Runs body(argument) in every thread of the grid. Throws std::runtime_error at the first thing that is wrong.
void run(const Configuration& configuration, void (*body)(void*), void* argument, size_t argument_bytes);

template <typename... Parameters>
struct Launcher {
  Configuration configuration;
  void (*kernel)(Parameters...);

  void operator()(Parameters... arguments) const {
    struct Call {
      void (*kernel)(Parameters...);
      std::tuple<Parameters...> arguments;
    } call{kernel, {arguments...}};
    run(
        configuration,
        [](void* call) { std::apply(static_cast<Call*>(call)->kernel, static_cast<Call*>(call)->arguments); }, &call,
        sizeof(call));
  }
};
template <typename... Parameters>
Launcher<Parameters...> launch(const char* name, int most_threads, void (*kernel)(Parameters...), Dim3 grid, Dim3 block,
                               size_t shared_bytes = 0, void* = nullptr) {
  return {{name, most_threads, grid, block, shared_bytes, reinterpret_cast<const void*>(kernel)}, kernel};
}

// ---- Inside a kernel ----

__attribute__((const)) Dim3 thread_index();
__attribute__((const)) Dim3 block_index();
__attribute__((const)) Dim3 block_dim();
__attribute__((const)) Dim3 grid_dim();

enum class Access { kRead, kWrite, kAtomic };
void access(const void* data, size_t bytes, Access kind, const void* site);  // site: where the program makes it

void barrier(int line);
// The values of all lanes of the mask, by lane, once all of them are here.
const uint64_t* collective(int line, uint32_t mask, uint64_t value);

// Places in shared memory: of a variable, which asks once, and of the dynamic part.
void* place_shared(size_t bytes, size_t alignment);
void* dynamic_shared();
template <typename T, typename Once>
T& shared_variable(Once) {
  static T* const place = static_cast<T*>(place_shared(sizeof(T), alignof(T) < 16 ? 16 : alignof(T)));
  return *place;
}

// ---- The runtime's errors ----

void set_error(int error);  // sticks until it is fetched
int fetch_error();
int peek_error();
void allow_shared(const void* function, size_t bytes);

}  // namespace emulator
