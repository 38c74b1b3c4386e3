// Permute and unpermute on CUDA: one block a token.
//
// A block reads its token's row once and writes it to each permuted row, from shared memory, or sums its permuted rows
// in registers and writes once, so each byte of the large matrices crosses memory once. A thread that sums keeps
// several 16-byte vectors of different permuted rows in flight before it uses the first; the row indices of a token are
// loaded together, not one after the other, and at a guessed place before its offsets say where they are. No atomics,
// no shared state between blocks: the same bits in every run.
//
// Shapes: T tokens, E experts, R rows, H hidden. "Row" below always means a permuted row.
#include "bulk_copy.cuh"
#include "cuda_common.cuh"
#include "permute.h"

namespace moe_opt {
namespace cuda {
namespace {

constexpr int kPermuteThreads = 128;
constexpr int kPieceBytes = 32 * 1024;  // of a token in shared memory at once, at most: several blocks a multiprocessor
constexpr int kRowsInFlight = 8;        // rows whose vectors a thread requests together
constexpr int kStagedRows = 256;        // rows of a token whose places are kept in shared memory

// [first, last): the entries of a token in the row map.
struct Entries {
  int64_t first;
  int64_t last;
};
__device__ __forceinline__ Entries entries_of(const int64_t* __restrict__ offsets, int64_t token) {
  return {offsets[token], offsets[token + 1]};
}

// Where each token has as many rows as any other, as without drops, the entries of token t are [t * rows_a_token,
// (t + 1) * rows_a_token). What lies there is loaded beside the offsets, which then say whether it was right: a load
// that waits for another one less. 0 where tokens cannot have equally many.
__device__ __forceinline__ Entries guessed_entries(int64_t token, int64_t rows_a_token) {
  return {token * rows_a_token, (token + 1) * rows_a_token};
}
int64_t rows_a_token(const RowMap& map) {
  return map.num_rows % map.num_tokens == 0 ? map.num_rows / map.num_tokens : 0;
}

// At a guessed place there may be no entry, but memory that nobody has written.
__device__ __forceinline__ float prob_of(const float* __restrict__ probs, int64_t token, int32_t expert,
                                         int64_t num_experts) {
  return 0 <= expert && expert < num_experts ? probs[token * num_experts + expert] : 0.0f;
}

// The rows of the entries [entry, entry + kRowsInFlight), -1 from `last` on.
__device__ __forceinline__ void load_rows(const int64_t* __restrict__ rows, int64_t entry, int64_t last,
                                          int64_t (&row)[kRowsInFlight]) {
#pragma unroll
  for (int r = 0; r < kRowsInFlight; ++r) row[r] = entry + r < last ? rows[entry + r] : -1;
}

// The lanes that hold the probabilities of rows: at data + row * stride_bytes, read and written in units.
struct ProbLanes {
  char* data;
  int64_t stride_bytes;
  int prob_units;  // units of a probability
  int lane_units;  // units of a lane; those past prob_units are zero
};

// rows[row, :] = tokens[t, :] for every row of t; lanes[row] = probs[t, expert] where kWithProbs.
// A token passes through shared memory in pieces. From there each row is written by a bulk store of a thread, where the
// device has those and a row is vectors, and else by a warp, or by several where a block has more warps than rows.
// Unit: what one access moves; a row is `units` of them, a piece `piece_units` (dynamic shared memory). grid: T.
template <typename Unit, typename ProbUnit, bool kWithProbs>
__global__ void __launch_bounds__(kPermuteThreads, 8)
    permute_rows_kernel(const int64_t* __restrict__ offsets, const int64_t* __restrict__ rows,
                        const int32_t* __restrict__ experts, int64_t num_experts, int64_t rows_a_token, int64_t units,
                        int piece_units, const char* __restrict__ tokens, int64_t token_stride,
                        char* __restrict__ permuted, int64_t permuted_stride, const ProbUnit* __restrict__ probs,
                        ProbLanes lanes) {
  constexpr bool kBulk = kBulkStores && sizeof(Unit) == kVectorBytes;
  extern __shared__ uint4 dynamic[];
  Unit* piece = reinterpret_cast<Unit*>(dynamic);
  const int64_t token = blockIdx.x;
  const Entries entries = entries_of(offsets, token);
  const Entries guess = guessed_entries(token, rows_a_token);
  // A row is written by `row_writers` threads; this thread's rows are those of the entries `writer`, + `writers`, ...
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int warps_a_row = 0 < rows_a_token && rows_a_token < warps ? warps / static_cast<int>(rows_a_token) : 1;
  const int row_writers = kBulk ? 1 : warps_a_row * kWarp;
  const int writers = static_cast<int>(blockDim.x) / row_writers;
  const int writer = static_cast<int>(threadIdx.x) / row_writers;
  const int64_t guessed_row = writer < guess.last - guess.first ? rows[guess.first + writer] : 0;
  const bool guessed = entries.first == guess.first && entries.last == guess.last;
  const Unit* source = reinterpret_cast<const Unit*>(tokens + token * token_stride);

  // The probability that this thread will write, requested before the rows are written.
  const int64_t own_entry = kWithProbs ? guess.first + threadIdx.x / lanes.lane_units : guess.last;
  const int32_t own_expert = own_entry < guess.last ? experts[own_entry] : 0;
  const int64_t lane_units = kWithProbs ? (entries.last - entries.first) * lanes.lane_units : 0;
  const auto prob_unit = [&](int64_t i) {
    const int64_t entry = entries.first + i / lanes.lane_units;
    const int unit = static_cast<int>(i % lanes.lane_units);
    const int32_t expert = entry == own_entry && entry < guess.last ? own_expert : experts[entry];
    const int64_t prob = (token * num_experts + expert) * lanes.prob_units;
    return unit < lanes.prob_units ? probs[prob + unit] : ProbUnit{0};
  };
  const ProbUnit own_unit = kWithProbs && int64_t{threadIdx.x} < lane_units ? prob_unit(threadIdx.x) : ProbUnit{0};

  for (int64_t base = 0; base < units; base += piece_units) {
    const int count = static_cast<int>(min(int64_t{piece_units}, units - base));
    if (base > 0) __syncthreads();  // the piece before has been read
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x) piece[i] = __ldcs(source + base + i);
    if (kBulk) bulk_publish();
    __syncthreads();
    for (int64_t entry = entries.first + writer; writer < writers && entry < entries.last; entry += writers) {
      const int64_t row = guessed && entry == entries.first + writer ? guessed_row : rows[entry];
      Unit* target = reinterpret_cast<Unit*>(permuted + row * permuted_stride) + base;
      if constexpr (kBulk) {
        bulk_store(target, piece, count * kVectorBytes);
      } else {
#pragma unroll 4
        for (int i = threadIdx.x % row_writers; i < count; i += row_writers) __stcs(target + i, piece[i]);
      }
    }
    if (kBulk) bulk_wait();
  }

  for (int64_t i = threadIdx.x; i < lane_units; i += blockDim.x) {
    const int64_t place = rows[entries.first + i / lanes.lane_units] * lanes.stride_bytes;
    ProbUnit* lane = reinterpret_cast<ProbUnit*>(lanes.data + place);
    lane[i % lanes.lane_units] = i == threadIdx.x ? own_unit : prob_unit(i);
  }
}

// tokens[t, :] = sum over the rows of t, ascending, of (probs[t, expert] *) permuted[row, :], in float32, each product
// rounded before it is added (no fused multiply-add), so that every device gives the same bits.
// Vectors of kCount elements; a row is `vectors` of them. grid: T.
template <typename T, int kCount, bool kWithProbs>
__global__ void __launch_bounds__(kBlockThreads, 2)
    unpermute_rows_kernel(const int64_t* __restrict__ offsets, const int64_t* __restrict__ rows,
                          const int32_t* __restrict__ experts, int64_t num_experts, int64_t rows_a_token,
                          int64_t vectors, const char* __restrict__ permuted, int64_t permuted_stride,
                          const float* __restrict__ probs, char* __restrict__ tokens, int64_t token_stride) {
  using Packed = Elements<T, kCount>;
  __shared__ int64_t row_starts[kStagedRows];  // bytes from `permuted` to the row
  __shared__ float weights[kStagedRows];
  const int64_t token = blockIdx.x;
  const auto stage = [&](int64_t entry, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      row_starts[i] = rows[entry + i] * permuted_stride;
      if (kWithProbs) weights[i] = prob_of(probs, token, experts[entry + i], num_experts);
    }
  };
  const Entries entries = entries_of(offsets, token);
  const Entries guess = guessed_entries(token, rows_a_token);
  stage(guess.first, static_cast<int>(min(int64_t{kStagedRows}, guess.last - guess.first)));
  __syncthreads();
  int64_t staged =
      entries.first == guess.first && entries.last == guess.last ? guess.first : -1;  // from which entry on

  for (int64_t base = 0; base < vectors; base += blockDim.x) {
    const int64_t index = base + threadIdx.x;
    float sum[kCount] = {};
    for (int64_t entry = entries.first; entry < entries.last; entry += kStagedRows) {
      const int count = static_cast<int>(min(int64_t{kStagedRows}, entries.last - entry));
      if (entry != staged) {
        __syncthreads();  // other warps may still use what was staged before
        stage(entry, count);
        __syncthreads();
        staged = entry;
      }
      if (index >= vectors) continue;
      for (int i = 0; i < count; i += kRowsInFlight) {
        Packed values[kRowsInFlight];
#pragma unroll
        for (int r = 0; r < kRowsInFlight; ++r) {
          if (i + r < count) values[r] = Packed::load(permuted + row_starts[i + r], index);
        }
#pragma unroll
        for (int r = 0; r < kRowsInFlight; ++r) {
          if (i + r >= count) continue;
          float value[kCount];
          values[r].to_float(value);
#pragma unroll
          for (int n = 0; n < kCount; ++n) {
            sum[n] = __fadd_rn(sum[n], kWithProbs ? __fmul_rn(weights[i + r], value[n]) : value[n]);
          }
        }
      }
    }
    if (index < vectors) Packed::from_float(sum).store(tokens + token * token_stride, index);
  }
}

// grad_permuted[row, :] = probs[t, expert] * grad_tokens[t, :];
// grad_probs[t, expert] = sum over H of grad_tokens[t, h] * permuted[row, h], in float32: in each thread over its
// vectors, then over lanes, then over warps, always in the same order. grid: T.
template <typename T, int kCount>
__global__ void __launch_bounds__(kBlockThreads, 2)
    unpermute_rows_backward_kernel(const int64_t* __restrict__ offsets, const int64_t* __restrict__ rows,
                                   const int32_t* __restrict__ experts, int64_t num_experts, int64_t rows_a_token,
                                   int64_t vectors, const char* __restrict__ grad_tokens, int64_t grad_token_stride,
                                   const char* __restrict__ permuted, int64_t permuted_stride,
                                   const float* __restrict__ probs, char* __restrict__ grad_permuted,
                                   int64_t grad_permuted_stride, float* __restrict__ grad_probs) {
  using Packed = Elements<T, kCount>;
  __shared__ float warp_dots[kRowsInFlight][kBlockThreads / kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t token = blockIdx.x;
  const Entries entries = entries_of(offsets, token);
  const Entries guess = guessed_entries(token, rows_a_token);
  int64_t row[kRowsInFlight];
  float weight[kRowsInFlight];
  const auto load_entries = [&](int64_t entry, int64_t last) {
    load_rows(rows, entry, last, row);
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      weight[r] = entry + r < last ? prob_of(probs, token, experts[entry + r], num_experts) : 0.0f;
    }
  };
  load_entries(guess.first, guess.last);
  const bool guessed = entries.first == guess.first && entries.last == guess.last;
  const char* grad_row = grad_tokens + token * grad_token_stride;

  for (int64_t entry = entries.first; entry < entries.last; entry += kRowsInFlight) {
    const int count = static_cast<int>(min(int64_t{kRowsInFlight}, entries.last - entry));
    float dot[kRowsInFlight] = {};
    if (!guessed || entry != entries.first) load_entries(entry, entries.last);
    for (int64_t index = threadIdx.x; index < vectors; index += blockDim.x) {
      const Packed grad_vector = Packed::load(grad_row, index);
      Packed values[kRowsInFlight];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        if (r < count) values[r] = Packed::load(permuted + row[r] * permuted_stride, index);
      }
      float grad[kCount];
      grad_vector.to_float(grad);
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        if (r >= count) continue;
        float value[kCount];
        float scaled[kCount];
        values[r].to_float(value);
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
          scaled[n] = __fmul_rn(weight[r], grad[n]);
          dot[r] = fmaf(grad[n], value[n], dot[r]);
        }
        Packed::from_float(scaled).store(grad_permuted + row[r] * grad_permuted_stride, index);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        dot[r] += __shfl_xor_sync(kAllLanes, dot[r], distance);
      }
      if (lane == 0) warp_dots[r][warp] = dot[r];
    }
    __syncthreads();
    if (threadIdx.x < count) {
      float total = 0;
      for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) total += warp_dots[threadIdx.x][w];
      grad_probs[token * num_experts + experts[entry + threadIdx.x]] = total;
    }
    __syncthreads();  // warp_dots is written again by the next entries
  }
}

// grad_probs[t, expert] = lanes[row] for every row of t. One warp a token.
template <typename ProbUnit>
__global__ void __launch_bounds__(kBlockThreads)
    unpermute_probs_kernel(const int64_t* __restrict__ offsets, const int64_t* __restrict__ rows,
                           const int32_t* __restrict__ experts, int64_t num_tokens, int64_t num_experts,
                           int64_t rows_a_token, const char* __restrict__ lanes, int64_t lane_stride, int prob_units,
                           ProbUnit* __restrict__ grad_probs) {
  const int64_t token = int64_t{blockIdx.x} * (kBlockThreads / kWarp) + threadIdx.x / kWarp;
  if (token >= num_tokens) return;
  const Entries entries = entries_of(offsets, token);
  const Entries guess = guessed_entries(token, rows_a_token);
  int64_t held = guess.first + threadIdx.x % kWarp;  // the entry whose row and expert these are
  int64_t row = held < guess.last ? rows[held] : 0;
  int32_t expert = held < guess.last ? experts[held] : 0;
  if (held >= guess.last) held = -1;
  for (int64_t entry = entries.first + threadIdx.x % kWarp; entry < entries.last; entry += kWarp) {
    if (entry != held) row = rows[entry], expert = experts[entry];
    const ProbUnit* lane = reinterpret_cast<const ProbUnit*>(lanes + row * lane_stride);
    ProbUnit* grad = grad_probs + (token * num_experts + expert) * prob_units;
    for (int unit = 0; unit < prob_units; ++unit) grad[unit] = lane[unit];
  }
}

// Calls launch(ProbUnit{}) with the widest unit, at most 4 bytes, that divides every lane's address and all sizes.
template <typename Rows, typename Launch>
void with_prob_unit(const Rows& lanes, int64_t lane_bytes, int64_t prob_size, const Launch& launch) {
  const auto fits = [&](int64_t bytes) {
    return rows_aligned(bytes, lanes) && lane_bytes % bytes == 0 && prob_size % bytes == 0;
  };
  with_unit<4, 2, 1>(fits, launch);
}

}  // namespace

void permute_rows(const RowMap& map, DType dtype, DType wire, int64_t hidden, ConstRows tokens, MutableRows permuted,
                  const void* probs, int64_t prob_size, MutableRows permuted_probs, int64_t prob_lane_bytes,
                  void* stream) {
  if (wire != dtype) {
    return permute_wire(map, dtype, wire, hidden, tokens, permuted, probs, prob_size, permuted_probs, prob_lane_bytes,
                        stream);
  }
  if (map.num_tokens == 0 || map.num_rows == 0) return;
  const unsigned blocks = grid_blocks(map.num_tokens, "permute_rows");
  const int64_t row_bytes = hidden * element_size(dtype);
  const auto fits = [&](int64_t bytes) { return row_bytes % bytes == 0 && rows_aligned(bytes, tokens, permuted); };
  const auto launch = [&](auto prob_unit, auto with_probs) {
    using ProbUnit = decltype(prob_unit);
    const ProbLanes lanes{static_cast<char*>(permuted_probs.data), permuted_probs.stride_bytes,
                          static_cast<int>(prob_size / sizeof(ProbUnit)),
                          static_cast<int>(prob_lane_bytes / sizeof(ProbUnit))};
    with_unit<kVectorBytes, 4, 2>(fits, [&](auto unit) {
      using Unit = decltype(unit);
      const int64_t units = row_bytes / static_cast<int64_t>(sizeof(Unit));
      const int piece_units = static_cast<int>(std::min<int64_t>(units, kPieceBytes / sizeof(Unit)));
      const int threads = std::min(kPermuteThreads, row_threads(units, 1));
      permute_rows_kernel<Unit, ProbUnit, with_probs>
          <<<blocks, threads, piece_units * sizeof(Unit), static_cast<cudaStream_t>(stream)>>>(
              map.offsets, map.rows, map.experts, map.num_experts, rows_a_token(map), units, piece_units,
              static_cast<const char*>(tokens.data), tokens.stride_bytes, static_cast<char*>(permuted.data),
              permuted.stride_bytes, static_cast<const ProbUnit*>(probs), lanes);
      check(cudaGetLastError(), "permute_rows_kernel");
    });
  };
  if (probs == nullptr) {
    launch(UnitOf<4>::type{}, std::false_type{});
  } else {
    with_prob_unit(permuted_probs, prob_lane_bytes, prob_size,
                   [&](auto prob_unit) { launch(prob_unit, std::true_type{}); });
  }
}

void unpermute_rows(const RowMap& map, DType dtype, int64_t hidden, ConstRows permuted, const float* probs,
                    MutableRows tokens, void* stream) {
  if (map.num_tokens == 0 || hidden == 0) return;
  const unsigned blocks = grid_blocks(map.num_tokens, "unpermute_rows");
  const bool wide = hidden * element_size(dtype) % kVectorBytes == 0 && rows_aligned(kVectorBytes, permuted, tokens);
  with_vector(dtype, wide, [&](auto element, auto count) {
    const int64_t vectors = hidden / count;
    const auto launch = [&](auto with_probs) {
      unpermute_rows_kernel<decltype(element), count, with_probs>
          <<<blocks, row_threads(vectors, 1), 0, static_cast<cudaStream_t>(stream)>>>(
              map.offsets, map.rows, map.experts, map.num_experts, rows_a_token(map), vectors,
              static_cast<const char*>(permuted.data), permuted.stride_bytes, probs, static_cast<char*>(tokens.data),
              tokens.stride_bytes);
      check(cudaGetLastError(), "unpermute_rows_kernel");
    };
    if (probs == nullptr) {
      launch(std::false_type{});
    } else {
      launch(std::true_type{});
    }
  });
}

void unpermute_rows_backward(const RowMap& map, DType dtype, int64_t hidden, ConstRows grad_tokens, ConstRows permuted,
                             const float* probs, MutableRows grad_permuted, float* grad_probs, void* stream) {
  if (map.num_tokens == 0 || map.num_experts == 0) return;
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  check(cudaMemsetAsync(grad_probs, 0, map.num_tokens * map.num_experts * sizeof(float), cuda_stream),
        "memset of grad_probs");
  if (map.num_rows == 0) return;
  const unsigned blocks = grid_blocks(map.num_tokens, "unpermute_rows_backward");
  const bool wide = hidden * element_size(dtype) % kVectorBytes == 0 &&
                    rows_aligned(kVectorBytes, grad_tokens, permuted, grad_permuted);
  with_vector(dtype, wide, [&](auto element, auto count) {
    const int64_t vectors = hidden / count;
    unpermute_rows_backward_kernel<decltype(element), count><<<blocks, row_threads(vectors, 1), 0, cuda_stream>>>(
        map.offsets, map.rows, map.experts, map.num_experts, rows_a_token(map), vectors,
        static_cast<const char*>(grad_tokens.data), grad_tokens.stride_bytes, static_cast<const char*>(permuted.data),
        permuted.stride_bytes, probs, static_cast<char*>(grad_permuted.data), grad_permuted.stride_bytes, grad_probs);
    check(cudaGetLastError(), "unpermute_rows_backward_kernel");
  });
}

void unpermute_probs(const RowMap& map, ConstRows grad_permuted_probs, int64_t prob_size, void* grad_probs,
                     void* stream) {
  if (map.num_tokens == 0 || map.num_experts == 0) return;
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  check(cudaMemsetAsync(grad_probs, 0, map.num_tokens * map.num_experts * prob_size, cuda_stream),
        "memset of grad_probs");
  if (map.num_rows == 0) return;
  const unsigned blocks = grid_blocks(divide_up(map.num_tokens, kBlockThreads / kWarp), "unpermute_probs");
  with_prob_unit(grad_permuted_probs, prob_size, prob_size, [&](auto prob_unit) {
    using ProbUnit = decltype(prob_unit);
    unpermute_probs_kernel<ProbUnit><<<blocks, kBlockThreads, 0, cuda_stream>>>(
        map.offsets, map.rows, map.experts, map.num_tokens, map.num_experts, rows_a_token(map),
        static_cast<const char*>(grad_permuted_probs.data), grad_permuted_probs.stride_bytes,
        static_cast<int>(prob_size / sizeof(ProbUnit)), static_cast<ProbUnit*>(grad_probs));
    check(cudaGetLastError(), "unpermute_probs_kernel");
  });
}

}  // namespace cuda
}  // namespace moe_opt
