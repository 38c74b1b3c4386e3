// The residual codec of expert migration: an expert travels as its largest differences from a shared expert.
//
// Encode keeps the `kept` residuals expert - shared of largest magnitude, exactly; decode adds them to the shared
// expert, which it turns into the expert where it lies, so that what has no entry is neither read nor written. Both are
// taken in float32 and rounded once to the element type. Magnitudes are compared before that rounding: NaN (every NaN
// alike) ranks above infinity, and among equals the lowest index comes first, so the result is unique.
//
// What no sum gives is sent whole, and known by a sum that is not finite: an element that is not finite itself as it
// is, and one that is with its sign turned, where shared is not finite or the residual overflows. So no NaN that decode
// ever wrote stays for good.
//
// Format, for n elements in blocks of 65,536 (the last may be shorter):
//   values   [kept]               residuals in the element type, in ascending order of their elements
//   indices  [2 * blocks + kept]  16-bit words. First, for each block, the number of entries up to its end, as two of
//                                 them, the low one first; then the place of every entry inside its block.
#pragma once

#include <cmath>
#include <cstdint>

#include "for_each.h"
#include "types.h"

namespace moe_opt {

constexpr int64_t kCodecBlock = 65536;            // elements that a 16-bit word can tell apart
constexpr int64_t kMaxCodecElements = INT32_MAX;  // of one expert

constexpr int64_t codec_blocks(int64_t numel) { return (numel + kCodecBlock - 1) / kCodecBlock; }
constexpr int64_t codec_index_words(int64_t numel, int64_t kept) { return 2 * codec_blocks(numel) + kept; }

// Encode looks through all residuals from a magnitude on that a sample suggests: the one of this rank among as many
// residuals. It stays below what the sample says, so that a little more than `kept` residuals of `numel` reach it.
inline int64_t sample_rank(int64_t numel, int64_t kept, int64_t samples) {
  constexpr double kSigmas = 4.0;
  const double expected = static_cast<double>(kept) / static_cast<double>(numel) * static_cast<double>(samples);
  return static_cast<int64_t>(expected + kSigmas * std::sqrt(expected)) + 1;
}

namespace cpu {

// 0 <= kept <= numel <= kMaxCodecElements. The work is cut into at most num_ranges parts, which for_each runs; the
// result does not depend on their number. Throws std::bad_alloc.
void sr_encode(DType dtype, int64_t numel, const void* expert, const void* shared, int64_t kept, void* values,
               uint16_t* indices, int64_t num_ranges, const ForEach& for_each);

// Whether the block ends that indices begin with rise from 0 to `kept`.
bool codec_ends_valid(int64_t numel, const uint16_t* indices, int64_t kept);

// Adds the entries of the blocks [begin, end), whose block ends are valid, to `expert`, which holds the shared one.
// False where the places of a block's entries do not ascend inside it; `expert` then holds nothing useful.
bool sr_decode(DType dtype, int64_t numel, const void* values, const uint16_t* indices, void* expert, int64_t begin,
               int64_t end);

}  // namespace cpu

namespace cuda {

// As in cpu, on `stream` (a cudaStream_t), without host synchronisation. All pointers are device pointers.

// Bytes of scratch memory that sr_encode needs.
int64_t sr_encode_scratch_bytes(DType dtype, int64_t numel, int64_t kept);

void sr_encode(DType dtype, int64_t numel, const void* expert, const void* shared, int64_t kept, void* values,
               uint16_t* indices, void* scratch, void* stream);

// Entries that lie outside [0, numel) or past `kept` are not read or written; other malformed indices are the caller's.
void sr_decode(DType dtype, int64_t numel, const void* values, const uint16_t* indices, int64_t kept, void* expert,
               void* stream);

}  // namespace cuda
}  // namespace moe_opt
