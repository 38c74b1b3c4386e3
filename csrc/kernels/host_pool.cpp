#include "host_pool.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <list>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(block, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(block, bytes)
#endif

namespace moe_opt {
namespace host_pool {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kHugePage = 2 << 20;

// Rounds up to one of eight sizes per power of two, so that nearly equal sizes share blocks at a waste of an eighth.
int64_t bucket_size(int64_t bytes) {
  if (bytes <= 8 * kCacheLine) return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  const int highest_bit = 63 - __builtin_clzll(static_cast<unsigned long long>(bytes));
  const int64_t step = int64_t{1} << (highest_bit - 3);
  return (bytes + step - 1) / step * step;
}

void* system_allocate(int64_t size) {
  if (size < kHugePage) {
    void* block = std::aligned_alloc(kCacheLine, static_cast<size_t>(size));
    if (block == nullptr) throw std::bad_alloc();
    return block;
  }
  // Map one huge page too many and cut both ends off.
  const int64_t mapped = size + kHugePage;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  uint8_t* start = static_cast<uint8_t*>(base);
  const int64_t head = -reinterpret_cast<intptr_t>(start) & (kHugePage - 1);
  if (head > 0) munmap(start, head);
  if (kHugePage - head > 0) munmap(start + head + size, kHugePage - head);
#ifdef MADV_HUGEPAGE
  madvise(start + head, size, MADV_HUGEPAGE);  // advice only: failure changes nothing but speed
#endif
  return start + head;
}

void system_release(void* block, int64_t size) {
  ASAN_UNPOISON_MEMORY_REGION(block, size);
  if (size < kHugePage) {
    std::free(block);
  } else {
    munmap(block, size);
  }
}

// The least limit of the control group in `folder`, below `root`, and of those that it is in.
int64_t limit_of_group(const std::string& root, std::string folder, const char* file, int64_t memory) {
  while (true) {
    int64_t limit = 0;
    if (std::ifstream(root + folder + file) >> limit) memory = std::min(memory, limit);  // "max" is no number
    const size_t end = folder.find_last_of('/');
    if (end == std::string::npos) return memory;
    folder.resize(end);
  }
}

// What the machine has, or what its containers and jobs leave of it to this process.
int64_t memory_of_process() {
  int64_t memory = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  std::ifstream groups("/proc/self/cgroup");  // a line each: number:controllers:folder
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), folder = line.substr(second + 1);
    if (controllers.empty()) memory = limit_of_group("/sys/fs/cgroup", folder, "/memory.max", memory);
    if (controllers == "memory") {
      memory = limit_of_group("/sys/fs/cgroup/memory", folder, "/memory.limit_in_bytes", memory);
    }
  }
  return memory;
}

// The ranks on this machine, as torchrun, Slurm or Open MPI say it; 1 where none does.
int64_t ranks_here() {
  for (const char* name : {"LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
    if (const char* ranks = std::getenv(name)) return std::max(1LL, std::atoll(ranks));
  }
  return 1;
}

// An eighth of the memory, and half of it for all ranks here together.
int64_t default_limit() { return memory_of_process() / std::max(int64_t{8}, 2 * ranks_here()); }

class Pool {
 public:
  // AddressSanitizer is told which bytes of a block are in use.
  void* allocate(int64_t bytes) {
    const int64_t size = bucket_size(bytes);
    void* block = allocate_block(size);
    ASAN_POISON_MEMORY_REGION(block, size);
    ASAN_UNPOISON_MEMORY_REGION(block, bytes);
    return block;
  }

  void release(void* block) {
    Evicted evicted;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(block);
    const int64_t size = found->second;
    used_.erase(found);
    ASAN_POISON_MEMORY_REGION(block, size);
    stats_.used_bytes -= size;
    stats_.cached_bytes += size;
    free_by_age_.push_back({block, size});
    free_by_size_[size].push_back(std::prev(free_by_age_.end()));
    evict_down_to(limit_, evicted);
  }

  void set_limit(int64_t bytes) {
    Evicted evicted;
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
    evict_down_to(bytes, evicted);
  }

  // Around a fork: no other thread's hold of the lock goes into the child, where nobody would let it go.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  HostPoolStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

 private:
  struct FreeBlock {
    void* block;
    int64_t size;
  };
  using FreeList = std::list<FreeBlock>;

  // Blocks that go back to the system when a scope ends: behind a lock that is taken after this was made, unlocked.
  struct Evicted {
    ~Evicted() {
      for (const FreeBlock& old : blocks) system_release(old.block, old.size);
    }
    std::vector<FreeBlock> blocks;
  };

  void* allocate_block(int64_t size) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto bucket = free_by_size_.find(size);
      if (bucket != free_by_size_.end() && !bucket->second.empty()) {
        const auto newest = bucket->second.back();  // the most likely to be in a cache still
        bucket->second.pop_back();
        void* block = newest->block;
        free_by_age_.erase(newest);
        used_.emplace(block, size);
        stats_.cached_bytes -= size;
        stats_.used_bytes += size;
        ++stats_.hits;
        return block;
      }
    }
    void* block = allocate_or_evict(size);
    std::lock_guard<std::mutex> lock(mutex_);
    used_.emplace(block, size);
    stats_.used_bytes += size;
    ++stats_.misses;
    return block;
  }

  // Where the system has no memory left, it gets back what is cached.
  void* allocate_or_evict(int64_t size) {
    try {
      return system_allocate(size);
    } catch (const std::bad_alloc&) {
      Evicted evicted;
      std::lock_guard<std::mutex> lock(mutex_);
      evict_down_to(0, evicted);
    }
    return system_allocate(size);
  }

  // Takes the oldest free blocks out until `bytes` are left.
  void evict_down_to(int64_t bytes, Evicted& evicted) {
    while (stats_.cached_bytes > bytes) {
      const auto oldest = free_by_age_.begin();
      auto& bucket = free_by_size_[oldest->size];
      bucket.erase(bucket.begin());  // within a bucket blocks are in order of age too
      stats_.cached_bytes -= oldest->size;
      evicted.blocks.push_back(*oldest);
      free_by_age_.pop_front();
    }
  }

  std::mutex mutex_;
  FreeList free_by_age_;                                                       // oldest first
  std::unordered_map<int64_t, std::vector<FreeList::iterator>> free_by_size_;  // oldest first
  std::unordered_map<void*, int64_t> used_;
  HostPoolStats stats_{};
  int64_t limit_ = default_limit();
};

Pool& pool() {
  static Pool* const instance = new Pool;  // leaked on purpose, see the header
  static const int forks [[maybe_unused]] =
      pthread_atfork([] { pool().lock(); }, [] { pool().unlock(); }, [] { pool().unlock(); });
  return *instance;
}

}  // namespace

void* allocate(int64_t bytes) { return pool().allocate(bytes); }
void release(void* block) {
  if (block != nullptr) pool().release(block);
}
void set_limit(int64_t bytes) { pool().set_limit(bytes); }
HostPoolStats stats() { return pool().stats(); }

}  // namespace host_pool
}  // namespace moe_opt
