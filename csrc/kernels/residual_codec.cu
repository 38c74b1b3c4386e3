// The residual codec on CUDA. Nothing waits for the host, and every sum is of integers: the result does not depend on
// the order in which blocks and atomics run.
//
// Encode reads the weights once, as a rule: a sample suggests a magnitude that a little more than k residuals reach,
// and every segment of the weights notes those that do, its candidates. A radix select over the candidates gives the
// exact k-th magnitude, and its ties and what is above it are written in order. If the sample misled, because fewer
// than k reach it or more than fit a segment's list, the later kernels read the residuals of that segment, or of all,
// from the weights again: slower, with the same result.
#include "cuda_common.cuh"
#include "residual_codec.h"

namespace moe_opt {
namespace cuda {
namespace {

constexpr int kSegment = 1024;  // elements that one warp looks through; divides a block of the format
constexpr int kSegmentsPerCodecBlock = kCodecBlock / kSegment;
constexpr int64_t kMaxSelectBlocks = 512;  // each looks at all histogram bins and, in the end, at all blocks' totals
constexpr int kSampleThreads = 1024;
constexpr int kThreadSamples = 8;
constexpr int kSamples = kSampleThreads * kThreadSamples;
constexpr int kBatch = 4;         // vectors of each tensor that a thread requests together
constexpr int kDecodeBlocks = 4;  // that share a block of the format: an expert has few of these

constexpr int kDigits = 3;  // of a 31-bit magnitude, 11, 10 and 10 bits, the upper ones first
constexpr int kMaxBins = 2048;
__host__ __device__ constexpr int digit_bits(int digit) { return digit == 0 ? 11 : 10; }
__host__ __device__ constexpr int digit_shift(int digit) { return 20 - 10 * digit; }

// What is known of the k-th magnitude after some digits: these, and its rank among the magnitudes that begin with them.
struct Prefix {
  uint32_t bits;
  int64_t rank;
};

// Zeroed before the first kernel of an encode.
struct Control {
  uint32_t least;                // magnitude from which on a residual is a candidate
  unsigned int candidates;       // of all segments
  Prefix prefixes[kDigits + 1];  // [d]: after d digits, d >= 1
  uint32_t histograms[kDigits][kMaxBins];
};

struct Counts {
  uint32_t above;  // residuals above the k-th magnitude
  uint32_t equal;  // residuals of exactly the k-th magnitude
};

// Scratch memory. Blocks of the select kernels own `block_segments` consecutive segments each.
struct Scratch {
  Control* control;
  uint32_t* segment_candidates;  // [segments], even where they exceed the capacity
  Counts* segment_counts;        // [segments]
  Counts* block_counts;          // [select_blocks]
  float* residuals;              // [segments, capacity], the candidates in order
  uint16_t* places;              // [segments, capacity], inside the codec block
  int64_t segments;
  int64_t block_segments;
  int64_t select_blocks;
  int capacity;
  int64_t bytes;

  Scratch(void* base, DType dtype, int64_t numel, int64_t kept) {
    segments = divide_up(numel, kSegment);
    block_segments = std::max<int64_t>(kBlockWarps, divide_up(segments, kMaxSelectBlocks));
    select_blocks = divide_up(segments, block_segments);
    // Twice the expected candidates and then some; more would seldom be used, fewer be exceeded by chance. Weights of 2
    // bytes change by a unit or two of their last place: thousands of residuals tie, and become candidates together.
    const int64_t times = element_size(dtype) == 2 ? 4 : 2;
    const int64_t wanted = kWarp + times * divide_up(kept * kSegment, numel);
    capacity = static_cast<int>(std::min<int64_t>(kSegment, divide_up(wanted, kWarp) * kWarp));
    char* next = static_cast<char*>(base);
    const auto take = [&](auto** array, int64_t count) {
      *array = reinterpret_cast<std::remove_reference_t<decltype(*array)>>(next);
      next += divide_up(count * static_cast<int64_t>(sizeof(**array)), kVectorBytes) * kVectorBytes;
    };
    take(&control, 1);
    take(&segment_candidates, segments);
    take(&segment_counts, segments);
    take(&block_counts, select_blocks);
    take(&residuals, segments * capacity);
    take(&places, segments * capacity);
    bytes = next - static_cast<char*>(base);
  }
};

struct Weights {
  const char* expert;
  const char* shared;
  int64_t numel;
};

__device__ __forceinline__ uint32_t magnitude(float residual) {
  return min(__float_as_uint(residual) & 0x7fffffffu, 0x7f800001u);  // every NaN alike, above infinity
}

__device__ __forceinline__ bool is_finite(float value) { return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u; }

// Only sums with a value of the largest binade, or with one that is not finite, overflow.
__device__ __forceinline__ float largest_binade(float) { return 0x1p127f; }
__device__ __forceinline__ float largest_binade(__nv_bfloat16) { return 0x1p127f; }
__device__ __forceinline__ float largest_binade(__half) { return 0x1p15f; }

template <typename T>
__device__ __forceinline__ float float_of(Elements<T, 1> element) {
  float value[1];
  element.to_float(value);
  return value[0];
}

template <typename T>
__device__ __forceinline__ Elements<T, 1> rounded(float value) {
  const float values[1] = {value};
  return Elements<T, 1>::from_float(values);
}

// What decode makes of an element of `shared` and its entry.
template <typename T>
__device__ __forceinline__ Elements<T, 1> decoded(Elements<T, 1> shared, Elements<T, 1> value) {
  const float number = float_of<T>(value);
  const Elements<T, 1> sum = rounded<T>(__fadd_rn(float_of<T>(shared), number));
  if (is_finite(float_of<T>(sum))) return sum;
  return is_finite(number) ? rounded<T>(-number) : value;
}

// The value of an entry whose residual, rounded to `value`, may be one of those that overflow.
template <typename T>
__device__ __forceinline__ Elements<T, 1> exact_value(Elements<T, 1> expert, Elements<T, 1> shared,
                                                      Elements<T, 1> value) {
  const float element = float_of<T>(expert), other = float_of<T>(shared), number = float_of<T>(value);
  if (!is_finite(element)) return expert;
  if (is_finite(float_of<T>(rounded<T>(__fadd_rn(other, number))))) return value;
  if (!is_finite(other) || !is_finite(number)) return rounded<T>(-element);
  --value.unit;  // rounded away from zero, past the largest element: the one below is as near
  return value;
}

__device__ __forceinline__ unsigned lower_lanes(unsigned ballot) {
  return __popc(ballot & ((1u << (threadIdx.x % kWarp)) - 1));
}

template <typename T>
__device__ __forceinline__ float residual_at(const Weights& weights, int64_t index) {
  float expert[1], shared[1];
  Elements<T, 1>::load(weights.expert, index).to_float(expert);
  Elements<T, 1>::load(weights.shared, index).to_float(shared);
  return __fsub_rn(expert[0], shared[0]);
}

// The bin that holds the rank-th largest entry of a histogram with at least `rank` entries, and the entry's rank in it.
// Every thread of the block calls it; the number of bins is a multiple of the number of threads.
__device__ Prefix find_bin(const uint32_t* histogram, int bins, int64_t rank) {
  __shared__ Prefix found;
  const int own = bins / static_cast<int>(blockDim.x);
  const int top = bins - 1 - own * static_cast<int>(threadIdx.x);  // this thread's bins lie from here downwards
  int64_t count = 0;
  for (int i = 0; i < own; ++i) count += histogram[top - i];
  int64_t above = block_sum(count).inclusive - count;
  for (int i = 0; i < own; ++i) {
    const int64_t in_bin = histogram[top - i];
    if (above < rank && rank <= above + in_bin) found = {static_cast<uint32_t>(top - i), rank - above};
    above += in_bin;
  }
  __syncthreads();
  return found;
}

// control->least = the rank-th largest magnitude of a sample, rank < kSamples <= numel / 2. One block.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads) guess_kernel(Weights weights, int rank, Control* control) {
  __shared__ uint32_t histogram[kMaxBins];
  uint32_t magnitudes[kThreadSamples];
#pragma unroll
  for (int s = 0; s < kThreadSamples; ++s) {
    // Evenly spread, each at a pseudo-random place of its share.
    const unsigned sample = s * kSampleThreads + threadIdx.x;
    const int64_t first = weights.numel * sample / kSamples;
    const int64_t room = weights.numel * (sample + 1) / kSamples - first;
    magnitudes[s] = magnitude(residual_at<T>(weights, first + (room * (sample * 2654435761u >> 16) >> 16)));
  }
  Prefix prefix{0, rank};
  for (int digit = 0; digit < kDigits; ++digit) {
    const int bits = digit_bits(digit), bins = 1 << bits;
    for (int bin = threadIdx.x; bin < bins; bin += kSampleThreads) histogram[bin] = 0;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kThreadSamples; ++s) {
      const uint32_t upper = magnitudes[s] >> digit_shift(digit);
      if (upper >> bits == prefix.bits) atomicAdd(&histogram[upper & (bins - 1)], 1u);
    }
    __syncthreads();
    const Prefix found = find_bin(histogram, bins, prefix.rank);
    prefix = {prefix.bits << bits | found.bits, found.rank};
  }
  if (threadIdx.x == 0) control->least = prefix.bits;
}

// The candidates of every segment, one warp a segment. Where kCount > 1, numel is a multiple of it.
template <typename T, int kCount>
__global__ void __launch_bounds__(kBlockThreads) collect_kernel(Weights weights, const __grid_constant__ Scratch to) {
  using Packed = Elements<T, kCount>;
  const int lane = threadIdx.x % kWarp;
  const int64_t segment = int64_t{blockIdx.x} * kBlockWarps + threadIdx.x / kWarp;
  const int64_t first = segment * kSegment;
  const int elements = static_cast<int>(max(int64_t{0}, min(int64_t{kSegment}, weights.numel - first)));
  const uint32_t least = to.control->least;
  float* const residuals = to.residuals + segment * to.capacity;
  uint16_t* const places = to.places + segment * to.capacity;
  const int first_place = static_cast<int>(first % kCodecBlock);
  int found = 0;
  for (int base = 0; base < elements; base += kBatch * kWarp * kCount) {
    Packed expert[kBatch], shared[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int index = base + (u * kWarp + lane) * kCount;
      if (index < elements) {
        expert[u] = Packed::load(weights.expert, (first + index) / kCount);
        shared[u] = Packed::load(weights.shared, (first + index) / kCount);
      }
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int index = base + (u * kWarp + lane) * kCount;
      float residual[kCount], other[kCount];
      expert[u].to_float(residual);
      shared[u].to_float(other);
      unsigned chosen = 0;  // bit i: element i of this lane's vector
      int position = found;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        residual[i] = __fsub_rn(residual[i], other[i]);
        const bool candidate = index < elements && magnitude(residual[i]) >= least;
        chosen |= static_cast<unsigned>(candidate) << i;
        const unsigned lanes = __ballot_sync(kAllLanes, candidate);
        position += lower_lanes(lanes);
        found += __popc(lanes);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (chosen >> i & 1 && position < to.capacity) {
          residuals[position] = residual[i];
          places[position] = static_cast<uint16_t>(first_place + index + i);
        }
        position += chosen >> i & 1;
      }
    }
  }
  if (lane == 0 && segment < to.segments) to.segment_candidates[segment] = found;
  const BlockSum sum = block_sum(lane == 0 ? found : 0);
  if (threadIdx.x == 0 && sum.total > 0) atomicAdd(&to.control->candidates, static_cast<unsigned int>(sum.total));
}

// The residuals of a segment that may be among the k largest: its list of candidates, or where that does not hold what
// is needed, all its elements.
template <typename T>
struct Segment {
  const Weights& weights;
  const float* residuals;
  const uint16_t* places;
  int64_t first;
  int count;
  bool all;

  __device__ Segment(const Weights& from, const Scratch& scratch, int64_t segment, int64_t kept) : weights(from) {
    residuals = scratch.residuals + segment * scratch.capacity;
    places = scratch.places + segment * scratch.capacity;
    first = segment * kSegment;
    const uint32_t candidates = scratch.segment_candidates[segment];
    all = scratch.control->candidates < kept || candidates > static_cast<uint32_t>(scratch.capacity);
    count = static_cast<int>(all ? min(int64_t{kSegment}, from.numel - first) : int64_t{candidates});
  }
  __device__ float residual(int i) const { return all ? residual_at<T>(weights, first + i) : residuals[i]; }
  __device__ uint16_t place(int i) const { return all ? static_cast<uint16_t>((first + i) % kCodecBlock) : places[i]; }
};

// What is known of the k-th magnitude once the histograms of `digits` digits are complete. Every thread of every block
// calls it; the blocks all find the same, and the first one leaves it to the next kernel.
__device__ Prefix find_prefix(const Scratch& scratch, int digits, int64_t kept) {
  if (digits == 0) return {0, kept};
  const Prefix before = digits == 1 ? Prefix{0, kept} : scratch.control->prefixes[digits - 1];
  const int bits = digit_bits(digits - 1);
  const Prefix found = find_bin(scratch.control->histograms[digits - 1], 1 << bits, before.rank);
  const Prefix prefix{before.bits << bits | found.bits, found.rank};
  if (blockIdx.x == 0 && threadIdx.x == 0) scratch.control->prefixes[digits] = prefix;
  return prefix;
}

// Calls visit(segment) for the segments of this block, each by one warp.
template <typename Visit>
__device__ __forceinline__ void for_each_segment(const Scratch& scratch, Visit visit) {
  const int64_t begin = blockIdx.x * scratch.block_segments;
  const int64_t end = min(scratch.segments, begin + scratch.block_segments);
  for (int64_t segment = begin + threadIdx.x / kWarp; segment < end; segment += kBlockWarps) visit(segment);
}

// Adds the digit of every magnitude that begins with the digits found so far to the digit's histogram.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    count_digits_kernel(Weights weights, const __grid_constant__ Scratch scratch, int digit, int64_t kept) {
  __shared__ uint32_t histogram[kMaxBins];
  const int bits = digit_bits(digit), bins = 1 << bits, shift = digit_shift(digit);
  for (int bin = threadIdx.x; bin < bins; bin += kBlockThreads) histogram[bin] = 0;
  const uint32_t prefix = find_prefix(scratch, digit, kept).bits;
  __syncthreads();
  for_each_segment(scratch, [&](int64_t index) {
    const Segment<T> segment(weights, scratch, index, kept);
    for (int i = threadIdx.x % kWarp; i < segment.count; i += kWarp) {
      const uint32_t upper = magnitude(segment.residual(i)) >> shift;
      if (upper >> bits == prefix) atomicAdd(&histogram[upper & (bins - 1)], 1u);
    }
  });
  __syncthreads();
  for (int bin = threadIdx.x; bin < bins; bin += kBlockThreads) {
    if (histogram[bin] > 0) atomicAdd(&scratch.control->histograms[digit][bin], histogram[bin]);
  }
}

// How many residuals of each segment, and of each block's segments, lie above and at the k-th magnitude.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    count_kept_kernel(Weights weights, const __grid_constant__ Scratch scratch, int64_t kept) {
  const uint32_t kth = find_prefix(scratch, kDigits, kept).bits;
  Counts own{0, 0};  // of this warp's segments; the same in all its lanes
  for_each_segment(scratch, [&](int64_t index) {
    const Segment<T> segment(weights, scratch, index, kept);
    Counts counts{0, 0};
    for (int i = threadIdx.x % kWarp; i < segment.count; i += kWarp) {
      const uint32_t size = magnitude(segment.residual(i));
      counts.above += size > kth;
      counts.equal += size == kth;
    }
    counts = {__reduce_add_sync(kAllLanes, counts.above), __reduce_add_sync(kAllLanes, counts.equal)};
    if (threadIdx.x % kWarp == 0) scratch.segment_counts[index] = counts;
    own = {own.above + counts.above, own.equal + counts.equal};
  });
  const bool leads = threadIdx.x % kWarp == 0;
  const int64_t above = block_sum(leads ? own.above : 0).total;
  const int64_t equal = block_sum(leads ? own.equal : 0).total;
  if (threadIdx.x == 0) {
    scratch.block_counts[blockIdx.x] = {static_cast<uint32_t>(above), static_cast<uint32_t>(equal)};
  }
}

// Writes the entries, and the block ends of the format.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads) write_kernel(Weights weights, const __grid_constant__ Scratch scratch,
                                                              int64_t kept, char* values, uint16_t* indices) {
  __shared__ uint32_t first_above[kBlockThreads], first_equal[kBlockThreads];  // before each segment
  const auto [kth, rank] = scratch.control->prefixes[kDigits];
  const uint32_t ties = static_cast<uint32_t>(rank);  // the first `ties` residuals of this magnitude are kept
  const int lane = threadIdx.x % kWarp;
  uint16_t* const kept_places = indices + 2 * divide_up(weights.numel, kCodecBlock);

  int64_t above = 0, equal = 0;  // in the segments of earlier blocks, then in all segments up to here
  for (int64_t b = threadIdx.x; b < blockIdx.x; b += kBlockThreads) {
    above += scratch.block_counts[b].above;
    equal += scratch.block_counts[b].equal;
  }
  above = block_sum(above).total;
  equal = block_sum(equal).total;

  const int64_t begin = blockIdx.x * scratch.block_segments;
  const int64_t end = min(scratch.segments, begin + scratch.block_segments);
  for (int64_t base = begin; base < end; base += kBlockThreads) {
    const int64_t own = base + threadIdx.x;
    const Counts counts = own < end ? scratch.segment_counts[own] : Counts{0, 0};
    const BlockSum sum_above = block_sum(counts.above);
    const BlockSum sum_equal = block_sum(counts.equal);
    first_above[threadIdx.x] = static_cast<uint32_t>(above + sum_above.inclusive - counts.above);
    first_equal[threadIdx.x] = static_cast<uint32_t>(equal + sum_equal.inclusive - counts.equal);
    above += sum_above.total;
    equal += sum_equal.total;
    __syncthreads();
    const int segments = static_cast<int>(min(int64_t{kBlockThreads}, end - base));
    for (int s = threadIdx.x / kWarp; s < segments; s += kBlockWarps) {
      const Segment<T> segment(weights, scratch, base + s, kept);
      uint32_t seen_ties = first_equal[s];
      uint32_t entry = first_above[s] + min(ties, seen_ties);
      for (int i = lane; i - lane < segment.count; i += kWarp) {
        const bool inside = i < segment.count;
        const float residual = inside ? segment.residual(i) : 0.0f;
        const uint32_t size = magnitude(residual);
        const bool tie = inside && size == kth;
        const unsigned tied = __ballot_sync(kAllLanes, tie);
        const bool keep = inside && (size > kth || (tie && seen_ties + lower_lanes(tied) < ties));
        const unsigned all_kept = __ballot_sync(kAllLanes, keep);
        if (keep) {
          const uint32_t position = entry + lower_lanes(all_kept);
          const uint16_t place = segment.place(i);
          Elements<T, 1> value = rounded<T>(residual);
          if (!(fabsf(float_of<T>(value)) < largest_binade(T{}))) {  // may overflow: as a rule none does
            const int64_t index = segment.first / kCodecBlock * kCodecBlock + place;
            value = exact_value<T>(Elements<T, 1>::load(weights.expert, index),
                                   Elements<T, 1>::load(weights.shared, index), value);
          }
          value.store(values, position);
          kept_places[position] = place;
        }
        entry += __popc(all_kept);
        seen_ties += __popc(tied);
      }
      const int64_t next = base + s + 1;
      if (lane == 0 && (next % kSegmentsPerCodecBlock == 0 || next == scratch.segments)) {
        uint16_t* const block_end = indices + 2 * ((next - 1) / kSegmentsPerCodecBlock);
        block_end[0] = static_cast<uint16_t>(entry);
        block_end[1] = static_cast<uint16_t>(entry >> 16);
      }
    }
    __syncthreads();  // the next round overwrites what was read
  }
}

__device__ __forceinline__ int64_t block_end(const uint16_t* indices, int64_t block) {
  return int64_t{indices[2 * block]} | int64_t{indices[2 * block + 1]} << 16;
}

// Adds the entries of a block of the format (x) to the expert: nothing else of it is read or written. A share each (y).
template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    decode_kernel(int64_t numel, const char* __restrict__ values, const uint16_t* __restrict__ indices, int64_t kept,
                  char* __restrict__ expert) {
  using Element = Elements<T, 1>;
  const int64_t block = blockIdx.x;
  const uint16_t* const places = indices + 2 * divide_up(numel, kCodecBlock);
  const int64_t begin = block > 0 ? block_end(indices, block - 1) : 0, end = min(kept, block_end(indices, block));
  const int first = static_cast<int>(blockIdx.y) * kBlockThreads + static_cast<int>(threadIdx.x);
  for (int64_t entry = begin + first; entry < end; entry += kDecodeBlocks * kBlockThreads) {
    const int64_t index = block * kCodecBlock + places[entry];
    if (index >= numel) continue;  // not what encode wrote
    decoded<T>(Element::load(expert, index), Element::load(values, entry)).store(expert, index);
  }
}

// Whether tensors of numel elements, one after the other, can be moved in vectors.
bool can_vectorize(DType dtype, int64_t numel, const void* a, const void* b) {
  return numel * element_size(dtype) % kVectorBytes == 0 &&
         rows_aligned(kVectorBytes, ConstRows{a, 0}, ConstRows{b, 0});
}

}  // namespace

int64_t sr_encode_scratch_bytes(DType dtype, int64_t numel, int64_t kept) {
  return kept == 0 ? 0 : Scratch(nullptr, dtype, numel, kept).bytes;
}

void sr_encode(DType dtype, int64_t numel, const void* expert, const void* shared, int64_t kept, void* values,
               uint16_t* indices, void* scratch_memory, void* stream) {
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (kept == 0) {
    const size_t bytes = codec_index_words(numel, 0) * sizeof(uint16_t);
    if (bytes > 0) check(cudaMemsetAsync(indices, 0, bytes, cuda_stream), "memset of block ends");
    return;
  }
  const Scratch scratch(scratch_memory, dtype, numel, kept);
  const Weights weights{static_cast<const char*>(expert), static_cast<const char*>(shared), numel};
  check(cudaMemsetAsync(scratch.control, 0, sizeof(Control), cuda_stream), "memset of sr_encode's scratch");

  // Without a guess, in small experts and for most of an expert, every residual is a candidate.
  const int rank = static_cast<int>(sample_rank(numel, kept, kSamples));
  const bool guess = numel >= 2 * kSamples && rank < kSamples;
  const unsigned collect_blocks = grid_blocks(divide_up(scratch.segments, kBlockWarps), "sr_encode");
  with_vector(dtype, can_vectorize(dtype, numel, expert, shared), [&](auto element, auto count) {
    using T = decltype(element);
    if (guess) {
      guess_kernel<T><<<1, kSampleThreads, 0, cuda_stream>>>(weights, rank, scratch.control);
      check(cudaGetLastError(), "guess_kernel");
    }
    collect_kernel<T, count><<<collect_blocks, kBlockThreads, 0, cuda_stream>>>(weights, scratch);
    check(cudaGetLastError(), "collect_kernel");
    const unsigned blocks = static_cast<unsigned>(scratch.select_blocks);
    for (int digit = 0; digit < kDigits; ++digit) {
      count_digits_kernel<T><<<blocks, kBlockThreads, 0, cuda_stream>>>(weights, scratch, digit, kept);
      check(cudaGetLastError(), "count_digits_kernel");
    }
    count_kept_kernel<T><<<blocks, kBlockThreads, 0, cuda_stream>>>(weights, scratch, kept);
    check(cudaGetLastError(), "count_kept_kernel");
    write_kernel<T>
        <<<blocks, kBlockThreads, 0, cuda_stream>>>(weights, scratch, kept, static_cast<char*>(values), indices);
    check(cudaGetLastError(), "write_kernel");
  });
}

void sr_decode(DType dtype, int64_t numel, const void* values, const uint16_t* indices, int64_t kept, void* expert,
               void* stream) {
  if (kept == 0) return;
  const dim3 blocks(grid_blocks(codec_blocks(numel), "sr_decode"), kDecodeBlocks);
  with_vector(dtype, false, [&](auto element, auto) {
    decode_kernel<decltype(element)><<<blocks, kBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        numel, static_cast<const char*>(values), indices, kept, static_cast<char*>(expert));
    check(cudaGetLastError(), "decode_kernel");
  });
}

}  // namespace cuda
}  // namespace moe_opt
