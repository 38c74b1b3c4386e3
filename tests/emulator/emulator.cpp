#include "emulator.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "counting.h"

extern "C" char __ehdr_start, _end;  // of this module
#pragma GCC visibility push(hidden)
extern "C" char __ehdr_start, _end;
#pragma GCC visibility pop

namespace emulator {
namespace {

// ---- Where everything lies ----

constexpr uintptr_t kBase = 0x100000000000;
constexpr size_t kDenseBytes = size_t{1} << 36;
constexpr size_t kRegionBytes = size_t{1} << 37;  // dense, then sparse
constexpr size_t kSharedBytes = size_t{1} << 20;  // the first of the dense part: shared memory
constexpr size_t kDynamicBytes = size_t{256} << 10;
constexpr size_t kGuard = 512;
uint32_t* const kWriters = reinterpret_cast<uint32_t*>(0x200000000000);  // a tag for each byte
uint32_t* const kReaders = reinterpret_cast<uint32_t*>(0x300000000000);  // of the dense part

// A tag: 21 bits of an interval between two barriers of a block, 10 bits of a thread, and one that says for a writer
// that it was an atomic, for a reader that there are several: threads (thread 0) or blocks (thread 1).
constexpr uint32_t kNobody = 0;  // no memory of anybody's
constexpr uint32_t kUnwritten = 1;
constexpr uint32_t kHost = 2;  // written outside of the launch that runs
constexpr int kIntervalShift = 11;
constexpr uint32_t kLastInterval = (1u << 21) - 1;
constexpr uint32_t kManyBlocks = 2;

constexpr int kMostThreads = 1024;
constexpr size_t kStackBytes = 64 << 10;

void* map_at(uintptr_t place, size_t bytes) {
  void* memory = mmap(reinterpret_cast<void*>(place), bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("emulator: no room for the memory of the emulated device");
    std::abort();
  }
  madvise(memory, bytes, MADV_DONTDUMP);
  return memory;
}

struct Memory {
  size_t next = kSharedBytes, next_sparse = kDenseBytes, next_shared = kGuard;
  std::map<uintptr_t, size_t> sizes, sparse;                 // offset and bytes of what is allocated
  std::unordered_map<size_t, std::deque<size_t>> free_list;  // by rounded size
  size_t allocated = 0, most = 0;                            // bytes, as PyTorch's allocator rounds them
  std::mutex mutex;

  Memory() {
    map_at(kBase, kRegionBytes);
    map_at(reinterpret_cast<uintptr_t>(kWriters), kRegionBytes * sizeof(uint32_t));
    map_at(reinterpret_cast<uintptr_t>(kReaders), kDenseBytes * sizeof(uint32_t));
  }
};
Memory& memory() {
  static Memory* const one = new Memory;  // freed by nobody: tensors may outlive everything
  return *one;
}

constexpr size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

void forget(void* begin, void* end) {  // zeros, and no pages
  const uintptr_t first = round_up(reinterpret_cast<uintptr_t>(begin), 4096);
  const uintptr_t last = reinterpret_cast<uintptr_t>(end) / 4096 * 4096;
  if (last > first + (size_t{1} << 20)) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    std::memset(begin, 0, first - reinterpret_cast<uintptr_t>(begin));
    std::memset(reinterpret_cast<void*>(last), 0, reinterpret_cast<uintptr_t>(end) - last);
  } else {
    std::memset(begin, 0, static_cast<char*>(end) - static_cast<char*>(begin));
  }
}

// ---- Fibers ----

extern "C" void emulator_switch(void** save, void* to);
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

enum class State : uint8_t { kRunnable, kBarrier, kWarp, kDone };

struct Fiber {
  void* stack_pointer;
  Dim3 index;
  State state;
  int line;  // where it waits
};

struct Warp {
  uint32_t arrived, mask;
  int line, phase;
  uint64_t values[2][32];
};

struct Machine {
  std::mutex mutex;  // one launch at a time
  char* stacks = static_cast<char*>(mmap(nullptr, kStackBytes* kMostThreads, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  void* scheduler = nullptr;
  Fiber fibers[kMostThreads];
  Warp warps[kMostThreads / 32];
  int runnable[kMostThreads];
  int num_runnable = 0, num_threads = 0, num_done = 0;
  const Configuration* configuration = nullptr;
  void (*body)(void*) = nullptr;
  char* argument = nullptr;
  size_t argument_bytes = 0;
  Dim3 block_index;
  std::string error;

  uint64_t random = 0x9e3779b97f4a7c15;
  int64_t launches = 0;
  uint32_t next_interval = 1;
  std::unordered_map<const void*, size_t> allowed_shared;
};
Machine& machine() {
  static Machine* const one = new Machine;
  return *one;
}

// What an access looks at, kept apart for speed.
Machine* m = nullptr;
int running = -1;             // the fiber, -1 outside of kernels
uint32_t mine = 0;            // the tag of an access of it
uint32_t launch_begin = 0;    // tags of this launch begin here
uint32_t block_begin = 0;     // of this block
uint32_t interval_begin = 0;  // since the last barrier
int64_t until_stop = 0;       // accesses until it is preempted
uint64_t mean_stop = 0;
size_t dynamic_bytes = 0;
bool races_allowed = false;

uint64_t draw() {
  uint64_t& x = m->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

void leave() { emulator_switch(&m->fibers[running].stack_pointer, m->scheduler); }

std::string where(uint32_t thread, const Dim3& block) {
  std::ostringstream text;
  text << "thread " << thread << " of block " << block.x;
  if (m->configuration->grid.y * m->configuration->grid.z > 1) text << ", " << block.y << ", " << block.z;
  return text.str();
}

[[noreturn]] void fail(const std::string& what) {
  m->error =
      std::string(m->configuration->kernel) + ": " + where(running < 0 ? 0 : running, m->block_index) + ": " + what;
  leave();
  std::abort();
}

void new_interval() {
  if (m->next_interval >= kLastInterval) {
    // The numbers begin anew; what was written stays written.
    Memory& all = memory();
    for (size_t i = 0; i < all.next; ++i) {
      if (kWriters[i] > kHost) kWriters[i] = kHost;
    }
    for (const auto& [offset, bytes] : all.sparse) {
      for (size_t i = offset; i < offset + bytes; ++i) {
        if (kWriters[i] > kHost) kWriters[i] = kHost;
      }
    }
    madvise(kReaders, all.next * sizeof(uint32_t), MADV_DONTNEED);
    m->next_interval = 1;
    launch_begin = block_begin = 1u << kIntervalShift;
  }
  interval_begin = m->next_interval++ << kIntervalShift;
}

std::string hex(const void* data) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", data);
  return text;
}

std::string describe(const void* data, size_t bytes) {
  const size_t offset = reinterpret_cast<uintptr_t>(data) - kBase;
  std::ostringstream text;
  text << bytes << " bytes at " << hex(data);
  if (offset < kSharedBytes) {
    text << " of shared memory";
    return text.str();
  }
  Memory& all = memory();
  const auto& sizes = offset < kDenseBytes ? all.sizes : all.sparse;
  auto after = sizes.upper_bound(offset);
  if (after != sizes.begin()) {
    --after;
    text << ", byte " << offset - after->first << " of an allocation of " << after->second;
  }
  return text.str();
}

void race(const void* data, size_t bytes, Access kind, uint32_t other, bool other_wrote) {
  if (races_allowed) return;
  const bool same_block = other >= block_begin;
  std::ostringstream text;
  text << (kind == Access::kRead    ? "reads "
           : kind == Access::kWrite ? "writes "
                                    : "adds to ")
       << describe(data, bytes) << ", which "
       << (same_block ? "thread " + std::to_string(other >> 1 & 1023) + " of the same block" : "another block")
       << (other_wrote ? " wrote" : " read") << (same_block ? " since the last barrier" : " in the same launch")
       << ": a race";
  fail(text.str());
}

void check_elsewhere(const void* data, size_t bytes) {
  const char* place = static_cast<const char*>(data);
  if (place >= m->stacks && place < m->stacks + kStackBytes * kMostThreads) {
    const char* own = m->stacks + kStackBytes * running;
    if (place < own || place >= own + kStackBytes) fail("reaches for a local variable of another thread");
    return;
  }
  if (place >= &__ehdr_start && place < &_end) return;                          // constants
  if (place >= m->argument && place < m->argument + m->argument_bytes) return;  // parameters
  fail("reaches for " + std::to_string(bytes) + " bytes of host memory at " + hex(data));
}

bool zeros_of_sparse(size_t offset, size_t bytes) {
  if (offset < kDenseBytes) return false;
  const auto& sparse = memory().sparse;
  static thread_local uintptr_t begin = 0, end = 0;
  if (offset < begin || offset + bytes > end) {
    auto after = sparse.upper_bound(offset);
    if (after == sparse.begin()) return false;
    --after;
    begin = after->first, end = after->first + after->second;
  }
  return offset >= begin && offset + bytes <= end;
}

// The slow way: byte by byte, with reasons.
template <Access kKind>
void check_bytes(const void* data, size_t offset, size_t bytes, bool whole) {
  const bool shared = offset < kSharedBytes, dense = offset < kDenseBytes;
  const uint32_t begin = shared ? block_begin : launch_begin;
  const auto unwritten = [&](uint32_t writer) { return writer == kUnwritten || (shared && writer < begin); };
  bool any_written = whole;  // a struct's copy may take along what nobody writes between its members
  for (size_t i = 0; i < bytes && !any_written; ++i) any_written = !unwritten(kWriters[offset + i]);
  for (size_t i = 0; i < bytes; ++i) {
    uint32_t& writer = kWriters[offset + i];
    if (writer == kNobody && !zeros_of_sparse(offset + i, 1)) {
      fail((kKind == Access::kRead ? "reads " : "writes ") + describe(data, bytes) + ": out of bounds");
    }
    if (kKind != Access::kWrite && unwritten(writer) && (whole || !any_written)) {
      fail("reads " + describe(data, bytes) + ", which nobody has written");
    }
    if (writer >= begin) {
      if (writer < block_begin) {
        if (!(kKind == Access::kAtomic && writer & 1)) race(data, bytes, kKind, writer, true);
      } else if (writer >= interval_begin) {
        const bool own = (writer ^ mine) < 2;
        if (!own && !(kKind == Access::kAtomic && writer & 1)) race(data, bytes, kKind, writer, true);
      }
    }
    if (!dense) {
      if (kKind != Access::kRead) writer = mine | (kKind == Access::kAtomic);
      continue;
    }
    uint32_t& reader = kReaders[offset + i];
    if (kKind == Access::kRead) {
      const bool blocks = (reader & (kManyBlocks | 1)) == (kManyBlocks | 1) && (reader >> 1 & 1023) == 1;
      if (reader < begin || reader == mine) {
        reader = mine;
      } else if (reader < block_begin || blocks) {
        reader = interval_begin | kManyBlocks | 1;
      } else if (reader < interval_begin) {
        reader = mine;
      } else {
        reader = interval_begin | 1;  // several threads
      }
    } else {
      if (reader >= begin) {
        const bool many = reader & 1;
        const bool blocks = many && (reader >> 1 & 1023) == 1;
        if (reader < block_begin || blocks) race(data, bytes, kKind, 0, false);
        if (reader >= interval_begin && (many || reader != mine)) race(data, bytes, kKind, reader, false);
      }
      writer = mine | (kKind == Access::kAtomic);
    }
  }
}

// Some tags side by side.
template <size_t kCount>
struct Tags {
  typedef uint32_t Vector __attribute__((vector_size(kCount * sizeof(uint32_t)), aligned(sizeof(uint32_t)), may_alias));
  static bool none(Vector flags) {
    uint64_t words[kCount / 2], any = 0;
    std::memcpy(words, &flags, sizeof(flags));
    for (size_t i = 0; i < kCount / 2; ++i) any |= words[i];
    return any == 0;
  }
  static Vector load(const uint32_t* tags) { return *reinterpret_cast<const Vector*>(tags); }
  static bool all_between(const uint32_t* tags, uint32_t least, uint32_t end) {
    return none(Vector(load(tags) - least >= end - least));
  }
  static bool all_equal(const uint32_t* tags) { return none(load(tags) ^ tags[0]); }
  static void fill(uint32_t* tags, uint32_t tag) { *reinterpret_cast<Vector*>(tags) = tag - Vector{}; }
};
template <>
struct Tags<1> {
  static bool all_between(const uint32_t* tags, uint32_t least, uint32_t end) { return *tags - least < end - least; }
  static bool all_equal(const uint32_t*) { return true; }
  static void fill(uint32_t* tags, uint32_t tag) { *tags = tag; }
};

// The usual cases at once: nobody else of this launch has been here, or all bytes have the same tag, which is harmless.
template <Access kKind, size_t kBytes>
__attribute__((always_inline)) inline bool quick(size_t offset) {
  const bool shared = offset < kSharedBytes;
  const uint32_t begin = shared ? block_begin : launch_begin;
  const uint32_t least = kKind == Access::kWrite ? kUnwritten : shared ? begin : kHost;
  uint32_t* const writers = kWriters + offset;
  uint32_t* const readers = kReaders + offset;
  if (!(least < begin && Tags<kBytes>::all_between(writers, least, begin))) {
    const uint32_t writer = writers[0];
    const bool ordered = writer >= block_begin && (writer < interval_begin || (writer ^ mine) < 2);
    const bool atomics = kKind == Access::kAtomic && writer >= begin && writer & 1;
    if (!(ordered || atomics) || !Tags<kBytes>::all_equal(writers)) return false;
  }
  const uint32_t reader = readers[0];
  if (kKind == Access::kRead) {
    if (reader == mine || reader == (interval_begin | 1) || reader == (interval_begin | kManyBlocks | 1)) {
      return Tags<kBytes>::all_equal(readers);
    }
    if (!Tags<kBytes>::all_between(readers, 0, begin)) return false;
    Tags<kBytes>::fill(readers, mine);
    return true;
  }
  if (!Tags<kBytes>::all_between(readers, 0, begin)) {
    const bool many = reader & 1, blocks = many && (reader >> 1 & 1023) == 1;
    const bool ordered = reader >= block_begin && !blocks && (reader < interval_begin || reader == mine);
    if (!ordered || !Tags<kBytes>::all_equal(readers)) return false;
  }
  Tags<kBytes>::fill(writers, mine | (kKind == Access::kAtomic));
  return true;
}

template <Access kKind>
__attribute__((always_inline)) inline void check(const void* data, size_t bytes, bool whole, const void* site) {
  if (running < 0) return;
  const size_t offset = reinterpret_cast<uintptr_t>(data) - kBase;
  if (offset >= kRegionBytes) return check_elsewhere(data, bytes);
  if (whole && offset % bytes != 0) {
    fail((kKind == Access::kRead ? "reads " : "writes ") + describe(data, bytes) + ": not a multiple of its size");
  }
  if (--until_stop <= 0) {
    until_stop = 1 + static_cast<int64_t>(draw() % (2 * mean_stop));
    m->fibers[running].state = State::kRunnable;
    leave();
  }
  bool good = false;
  if (offset < kDenseBytes) {
    switch (bytes) {
      case 1:
        good = quick<kKind, 1>(offset);
        break;
      case 2:
        good = quick<kKind, 2>(offset);
        break;
      case 4:
        good = quick<kKind, 4>(offset);
        break;
      case 8:
        good = quick<kKind, 8>(offset);
        break;
      case 16:
        good = quick<kKind, 16>(offset);
        break;
    }
  }
  if (!good) check_bytes<kKind>(data, offset, bytes, whole);
  if (counting::on && offset >= kSharedBytes) {
    counting::access(running, site, offset, bytes, kKind != Access::kWrite, kKind != Access::kRead);
  }
}

void enter() {
  m->body(m->argument);
  m->fibers[running].state = State::kDone;
  leave();
  std::abort();
}

void resume(int fiber) {
  running = fiber;
  mine = interval_begin | static_cast<uint32_t>(fiber) << 1;
  emulator_switch(&m->scheduler, m->fibers[fiber].stack_pointer);
  running = -1;
}

// One block: whoever can run, in any order.
void run_block(Dim3 block) {
  m->block_index = block;
  new_interval();
  block_begin = interval_begin;
  const Dim3& size = m->configuration->block;
  m->num_runnable = m->num_threads;
  m->num_done = 0;
  for (int t = 0; t < m->num_threads; ++t) {
    Fiber& fiber = m->fibers[t];
    const unsigned thread = static_cast<unsigned>(t);
    fiber.index = {thread % size.x, thread / size.x % size.y, thread / (size.x * size.y)};
    fiber.state = State::kRunnable;
    void** top = reinterpret_cast<void**>(m->stacks + kStackBytes * (t + 1)) - 2;  // as after a call
    *top = reinterpret_cast<void*>(&enter);
    fiber.stack_pointer = top - 6;
    m->runnable[t] = t;
  }
  for (int w = 0; w < (m->num_threads + 31) / 32; ++w) m->warps[w].arrived = m->warps[w].phase = 0;
  while (m->num_done < m->num_threads) {
    if (m->num_runnable == 0) {
      int waiting = 0, line = 0;
      for (int t = 0; t < m->num_threads; ++t) {
        const Fiber& fiber = m->fibers[t];
        if (fiber.state == State::kWarp) {
          running = t;
          m->error = std::string(m->configuration->kernel) + ": " + where(t, block) +
                     ": waits for ever for the other lanes of its warp, in line " + std::to_string(fiber.line);
          running = -1;
          return;
        }
        if (fiber.state != State::kBarrier) continue;
        if (waiting > 0 && fiber.line != line) {
          m->error = std::string(m->configuration->kernel) + ": " + where(t, block) +
                     ": waits at the barrier of line " + std::to_string(fiber.line) + ", others at that of line " +
                     std::to_string(line);
          return;
        }
        ++waiting, line = fiber.line;
      }
      new_interval();
      for (int t = 0; t < m->num_threads; ++t) {
        if (m->fibers[t].state != State::kBarrier) continue;
        m->fibers[t].state = State::kRunnable;
        m->runnable[m->num_runnable++] = t;
      }
    }
    const int choice = m->num_runnable == 1 ? 0 : static_cast<int>(draw() % m->num_runnable);
    const int next = m->runnable[choice];
    m->runnable[choice] = m->runnable[--m->num_runnable];
    resume(next);
    if (!m->error.empty()) return;
    if (m->fibers[next].state == State::kRunnable) m->runnable[m->num_runnable++] = next;
    if (m->fibers[next].state == State::kDone) ++m->num_done;
  }
  counting::end_block();
}

}  // namespace

void* allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  Memory& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.allocated += round_up(bytes, kGuard);
  all.most = std::max(all.most, all.allocated);
  size_t offset;
  if (bytes >= kSparseBytes) {
    offset = all.next_sparse;
    all.next_sparse += round_up(bytes, 4096) + 4096;
    if (all.next_sparse > kRegionBytes) throw std::runtime_error("emulator: out of device memory");
    all.sparse[offset] = bytes;
    return reinterpret_cast<void*>(kBase + offset);
  }
  const size_t rounded = round_up(bytes, kGuard);
  std::deque<size_t>& reusable = all.free_list[rounded];
  if (reusable.size() > (bytes < (1 << 20) ? 16 : 2)) {  // not what was freed last: who still uses that is found out
    offset = reusable.front();
    reusable.pop_front();
  } else {
    offset = all.next;
    all.next += rounded + kGuard;
    if (all.next > kDenseBytes) throw std::runtime_error("emulator: out of device memory");
  }
  all.sizes[offset] = bytes;
  std::fill_n(kWriters + offset, bytes, kUnwritten);
  return reinterpret_cast<void*>(kBase + offset);
}

void release(void* data) {
  if (data == nullptr) return;
  Memory& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  const size_t offset = reinterpret_cast<uintptr_t>(data) - kBase;
  auto& sizes = offset < kDenseBytes ? all.sizes : all.sparse;
  const auto found = sizes.find(offset);
  if (found == sizes.end()) std::abort();
  const size_t bytes = found->second;
  sizes.erase(found);
  all.allocated -= round_up(bytes, kGuard);
  forget(kWriters + offset, kWriters + offset + bytes);
  if (offset < kDenseBytes) {
    forget(kReaders + offset, kReaders + offset + bytes);
    all.free_list[round_up(bytes, kGuard)].push_back(offset);
  } else {
    forget(data, static_cast<char*>(data) + bytes);
  }
}

size_t allocated() { return memory().allocated; }
size_t most_allocated() { return memory().most; }
void reset_most_allocated() { memory().most = memory().allocated; }

bool is_device(const void* data) { return reinterpret_cast<uintptr_t>(data) - kBase < kRegionBytes; }

void host_writes(const void* data, size_t bytes) {
  const size_t offset = reinterpret_cast<uintptr_t>(data) - kBase;
  if (offset < kDenseBytes) std::fill_n(kWriters + offset, bytes, kHost);
}

void host_reads(const void* data, size_t bytes, const char* what) {
  const size_t offset = reinterpret_cast<uintptr_t>(data) - kBase;
  if (offset >= kDenseBytes) return;
  for (size_t i = 0; i < bytes; ++i) {
    if (kWriters[offset + i] == kUnwritten) {
      throw std::runtime_error("emulator: " + std::string(what) + " reads byte " + std::to_string(i) + " of " +
                               std::to_string(bytes) + ", which nobody has written");
    }
  }
}

void host_forgets(const void* data, size_t bytes) {
  const size_t offset = reinterpret_cast<uintptr_t>(data) - kBase;
  if (offset < kDenseBytes) std::fill_n(kWriters + offset, bytes, kUnwritten);
}

bool nobody_wrote(const void* data, size_t bytes) {
  const size_t offset = reinterpret_cast<uintptr_t>(data) - kBase;
  const uint32_t* first = kWriters + offset;
  return offset >= kDenseBytes || std::all_of(first, first + bytes, [](uint32_t tag) { return tag == kUnwritten; });
}

void set_seed(uint64_t seed) {
  std::lock_guard<std::mutex> lock(machine().mutex);
  machine().random = (seed + 1) * 0x9e3779b97f4a7c15;
}

void allow_races(bool allow) { races_allowed = allow; }

int64_t launches() { return machine().launches; }

int multiprocessors = 132;

void run(const Configuration& configuration, void (*body)(void*), void* argument, size_t argument_bytes) {
  Machine& one = machine();
  std::lock_guard<std::mutex> lock(one.mutex);
  m = &one;
  memory();
  const Dim3 &grid = configuration.grid, &block = configuration.block;
  const size_t threads = size_t{block.x} * block.y * block.z;
  const auto allowed = m->allowed_shared.find(configuration.function);
  const size_t most_shared =
      allowed == m->allowed_shared.end() ? 48 << 10 : std::max<size_t>(48 << 10, allowed->second);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535 ||
      threads == 0 || threads > static_cast<size_t>(configuration.most_threads) ||
      configuration.shared_bytes > most_shared) {
    return set_error(9);  // cudaErrorInvalidConfiguration
  }
  ++m->launches;
  m->configuration = &configuration;
  m->body = body;
  m->argument = static_cast<char*>(argument);
  m->argument_bytes = argument_bytes;
  m->num_threads = static_cast<int>(threads);
  m->error.clear();
  constexpr size_t kDynamicOffset = kSharedBytes - kDynamicBytes;
  std::fill_n(kWriters + kDynamicOffset, configuration.shared_bytes, kUnwritten);
  if (dynamic_bytes > configuration.shared_bytes) {
    std::fill_n(kWriters + kDynamicOffset + configuration.shared_bytes, dynamic_bytes - configuration.shared_bytes,
                kNobody);
  }
  dynamic_bytes = configuration.shared_bytes;

  constexpr uint64_t kMeans[] = {uint64_t{1} << 40, 1000, 50, 3};
  mean_stop = kMeans[draw() % 4];
  until_stop = 1 + static_cast<int64_t>(draw() % (2 * mean_stop));
  launch_begin = m->next_interval << kIntervalShift;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  counting::launch(configuration.kernel, blocks, threads);
  // A random order without a list of it: steps of a number that shares no factor with the number of blocks.
  uint64_t step = draw() % blocks | 1, place = draw() % blocks;
  const auto divisor = [](uint64_t a, uint64_t b) {
    while (b != 0) std::swap(a %= b, b);
    return a;
  };
  while (divisor(step, blocks) != 1) ++step;
  for (uint64_t b = 0; b < blocks && m->error.empty(); ++b, place = (place + step) % blocks) {
    run_block({static_cast<unsigned>(place % grid.x), static_cast<unsigned>(place / grid.x % grid.y),
               static_cast<unsigned>(place / grid.x / grid.y)});
  }
  m->configuration = nullptr;
  if (!m->error.empty()) throw std::runtime_error("emulator: " + m->error);
}

Dim3 thread_index() { return m->fibers[running].index; }
Dim3 block_index() { return m->block_index; }
Dim3 block_dim() { return m->configuration->block; }
Dim3 grid_dim() { return m->configuration->grid; }

void access(const void* data, size_t bytes, Access kind, const void* site) {
  switch (kind) {
    case Access::kRead:
      return check<Access::kRead>(data, bytes, true, site);
    case Access::kWrite:
      return check<Access::kWrite>(data, bytes, true, site);
    case Access::kAtomic:
      return check<Access::kAtomic>(data, bytes, true, site);
  }
}

void barrier(int line) {
  m->fibers[running].state = State::kBarrier;
  m->fibers[running].line = line;
  leave();
}

const uint64_t* collective(int line, uint32_t mask, uint64_t value) {
  Warp& warp = m->warps[running / 32];
  const int lane = running % 32, phase = warp.phase;
  if ((mask >> lane & 1) == 0) fail("is not in the mask of its own warp collective, in line " + std::to_string(line));
  if (warp.arrived != 0 && (warp.line != line || warp.mask != mask)) {
    fail("is at the warp collective of line " + std::to_string(line) + ", other lanes at that of line " +
         std::to_string(warp.line));
  }
  warp.line = line, warp.mask = mask;
  warp.arrived |= 1u << lane;
  warp.values[phase][lane] = value;
  if (warp.arrived != mask) {
    m->fibers[running].state = State::kWarp;
    m->fibers[running].line = line;
    leave();
    return warp.values[phase];
  }
  warp.arrived = 0;
  warp.phase = 1 - phase;
  for (int other = 0; other < 32; ++other) {
    if (other == lane || (mask >> other & 1) == 0) continue;
    const int fiber = running / 32 * 32 + other;
    m->fibers[fiber].state = State::kRunnable;
    m->runnable[m->num_runnable++] = fiber;
  }
  return warp.values[phase];
}

void* place_shared(size_t bytes, size_t alignment) {
  Memory& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  const size_t offset = round_up(all.next_shared, alignment);
  all.next_shared = offset + bytes + kGuard;
  if (all.next_shared > kSharedBytes - kDynamicBytes) std::abort();
  std::fill_n(kWriters + offset, bytes, kUnwritten);
  return reinterpret_cast<void*>(kBase + offset);
}

void* dynamic_shared() { return reinterpret_cast<void*>(kBase + kSharedBytes - kDynamicBytes); }

namespace {
int last_error = 0;
}
void set_error(int error) { last_error = error; }
int peek_error() { return last_error; }
int fetch_error() { return std::exchange(last_error, 0); }
void allow_shared(const void* function, size_t bytes) { machine().allowed_shared[function] = bytes; }

// ---- What the compiler calls at every access of a kernel (-fsanitize=thread, without its library) ----

#define EMULATOR_CALLBACKS(bytes)                                          \
  extern "C" void __tsan_read##bytes(void* data) {                         \
    check<Access::kRead>(data, bytes, true, __builtin_return_address(0));  \
  }                                                                        \
  extern "C" void __tsan_write##bytes(void* data) {                        \
    check<Access::kWrite>(data, bytes, true, __builtin_return_address(0)); \
  }                                                                        \
  extern "C" void __tsan_unaligned_read##bytes(void* data) {               \
    check<Access::kRead>(data, bytes, true, __builtin_return_address(0));  \
  }                                                                        \
  extern "C" void __tsan_unaligned_write##bytes(void* data) {              \
    check<Access::kWrite>(data, bytes, true, __builtin_return_address(0)); \
  }
EMULATOR_CALLBACKS(1)
EMULATOR_CALLBACKS(2)
EMULATOR_CALLBACKS(4)
EMULATOR_CALLBACKS(8)
// Only a struct has 16 bytes here: what the device moves in one access of 16 comes through access().
extern "C" void __tsan_read16(void* data) { check<Access::kRead>(data, 16, false, __builtin_return_address(0)); }
extern "C" void __tsan_write16(void* data) { check<Access::kWrite>(data, 16, false, __builtin_return_address(0)); }
extern "C" void __tsan_unaligned_read16(void* data) {
  check<Access::kRead>(data, 16, false, __builtin_return_address(0));
}
extern "C" void __tsan_unaligned_write16(void* data) {
  check<Access::kWrite>(data, 16, false, __builtin_return_address(0));
}
extern "C" void __tsan_read_range(void* data, size_t bytes) {
  check<Access::kRead>(data, bytes, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* data, size_t bytes) {
  check<Access::kWrite>(data, bytes, false, __builtin_return_address(0));
}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_init() {}

}  // namespace emulator
