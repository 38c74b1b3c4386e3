// A caching allocator for large host buffers.
//
// The first touch of fresh memory costs several times what a copy into it costs (page faults), and malloc gives large
// blocks back to the system as soon as they are freed. The pool keeps freed blocks, by size, and hands them out again.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_opt {

struct HostPoolStats {
  int64_t used_bytes;    // in blocks that are handed out
  int64_t cached_bytes;  // in blocks that wait to be handed out again
  int64_t hits;          // allocations served from the cache
  int64_t misses;        // allocations that went to the system
};

// All functions may be called from any thread. There is one pool per process; it is never destroyed, so that a
// buffer may be freed as late as the interpreter's exit.
namespace host_pool {

// A block of at least `bytes` > 0 bytes, aligned to 64 bytes (blocks of 2 MiB and more to 2 MiB, huge pages advised).
// Contents are undefined. Throws std::bad_alloc.
void* allocate(int64_t bytes);

// Gives back a block of allocate(); null is ignored.
void release(void* block);

// Upper bound on cached_bytes (initially an eighth of the machine's memory, or less among many ranks). Blocks unused
// for longest go first. Only tests set another one.
void set_limit(int64_t bytes);

HostPoolStats stats();

}  // namespace host_pool
}  // namespace moe_opt
