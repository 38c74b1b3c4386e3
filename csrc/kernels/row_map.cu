// Row maps on CUDA: which permuted rows belong to which token.
//
// The routing map is read once, as bits: a tile of 64 tokens becomes one 64-bit mask an expert. Everything after that
// is popcounts, so no [T, E] table of integers is written, and no block waits for another inside a kernel.
//
// Shapes: T tokens, E experts, R rows, B = ceil(T / 64) tiles. All counts are integers: the result does not depend on
// the order in which blocks run.
#include "cuda_common.cuh"
#include "row_map.h"

namespace moe_opt {
namespace cuda {
namespace {

constexpr int kTileTokens = 64;                            // bits of a mask
constexpr int kScanWarps = 32;                             // warps that share the tiles of 32 experts
constexpr int64_t kEntryBytes = 2 * sizeof(int64_t);       // shared memory an expert takes in fill_rows_kernel
constexpr int64_t kDefaultSharedBytes = 48 * 1024 - 1024;  // without an opt-in, less the static part

// masks[tile, e]: bit j = token 64 * tile + j goes to expert e. One thread an expert, coalesced over experts.
__global__ void __launch_bounds__(kBlockThreads)
    pack_masks_kernel(const uint8_t* __restrict__ routing_map, int64_t num_tokens, int64_t num_experts,
                      uint64_t* __restrict__ masks) {
  const int64_t tile = blockIdx.x;
  const int64_t expert = int64_t{blockIdx.y} * kBlockThreads + threadIdx.x;
  if (expert >= num_experts) return;
  const int64_t first = tile * kTileTokens;
  const int tokens = static_cast<int>(min(int64_t{kTileTokens}, num_tokens - first));
  const uint8_t* column = routing_map + first * num_experts + expert;
  uint64_t mask = 0;
#pragma unroll 16
  for (int j = 0; j < tokens; ++j) mask |= uint64_t{column[j * num_experts] != 0} << j;
  masks[tile * num_experts + expert] = mask;
}

// rows_before[tile, e] = tokens of expert e in earlier tiles; expert_totals[e] = tokens of expert e in all tiles.
// A block takes 32 experts, one a lane; its warps take consecutive ranges of tiles.
__global__ void __launch_bounds__(kWarp* kScanWarps)
    scan_tiles_kernel(const uint64_t* __restrict__ masks, int64_t num_tiles, int64_t num_experts,
                      int64_t* __restrict__ rows_before, int64_t* __restrict__ expert_totals) {
  __shared__ int64_t totals[kScanWarps][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t expert = int64_t{blockIdx.x} * kWarp + lane;
  const int64_t tiles_a_warp = divide_up(num_tiles, kScanWarps);
  const int64_t begin = min(num_tiles, warp * tiles_a_warp);
  const int64_t end = expert < num_experts ? min(num_tiles, begin + tiles_a_warp) : begin;

  int64_t total = 0;
#pragma unroll 8
  for (int64_t tile = begin; tile < end; ++tile) total += __popcll(masks[tile * num_experts + expert]);
  totals[warp][lane] = total;
  __syncthreads();

  int64_t before = 0;
  for (int w = 0; w < warp; ++w) before += totals[w][lane];
#pragma unroll 8
  for (int64_t tile = begin; tile < end; ++tile) {
    rows_before[tile * num_experts + expert] = before;
    before += __popcll(masks[tile * num_experts + expert]);
  }
  if (warp == kScanWarps - 1 && expert < num_experts) expert_totals[expert] = before;
}

// One block a tile: turns totals into first rows, counts the kept rows of its tokens, writes their entries.
// expert_counts[e] = kept rows of expert e, written by the block of tile 0.
// Where kPadded, every expert owns `capacity` rows: its routed tokens first, then the lowest of the others.
// Dynamic shared memory: first_rows [E], masks [E].
template <bool kPadded>
__global__ void __launch_bounds__(kBlockThreads, 4)  // more would have to spill registers
    fill_rows_kernel(const uint64_t* __restrict__ tile_masks, const int64_t* __restrict__ rows_before,
                     const int64_t* __restrict__ expert_totals, int64_t num_tokens, int num_experts, int64_t max_rows,
                     int64_t capacity, int64_t* __restrict__ offsets, int64_t* __restrict__ rows,
                     int32_t* __restrict__ experts, int64_t* __restrict__ sources,
                     int64_t* __restrict__ expert_counts) {
  extern __shared__ int64_t shared[];
  int64_t* first_rows = shared;  // the first row of this tile for each expert; where kPadded, among its expert's rows
  uint64_t* masks = reinterpret_cast<uint64_t*>(shared + num_experts);
  __shared__ int64_t token_entries[kTileTokens];  // kept rows of each token, then its first entry

  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t tile = blockIdx.x;
  const int64_t first_token = tile * kTileTokens;
  const int tokens = static_cast<int>(min(int64_t{kTileTokens}, num_tokens - first_token));

  // Exclusive sum of expert_totals, and the entries that the tokens of earlier tiles own.
  int64_t rows_of_earlier_experts = 0;
  int64_t earlier_entries = 0;
  for (int base = 0; base < num_experts; base += kBlockThreads) {
    const int e = base + static_cast<int>(threadIdx.x);
    const int64_t total = e < num_experts ? expert_totals[e] : 0;
    const BlockSum sum = block_sum(total);
    const int64_t expert_row = rows_of_earlier_experts + sum.inclusive - total;
    rows_of_earlier_experts += sum.total;
    if (e < num_experts) {
      const int64_t before = rows_before[tile * num_experts + e];
      const int64_t room = kPadded ? capacity : max(int64_t{0}, max_rows - expert_row);
      first_rows[e] = kPadded ? before : expert_row + before;
      masks[e] = tile_masks[tile * num_experts + e];
      earlier_entries += min(before, room);
      if (kPadded) earlier_entries += min(first_token - before, max(int64_t{0}, capacity - total));
      if (!kPadded && tile == 0) expert_counts[e] = min(total, room);
    }
  }
  const int64_t first_entry = block_sum(earlier_entries).total;

  // The row of token j with expert e, or -1 where they have none or it is cut off.
  const auto row_of = [&](int j, int e) -> int64_t {
    if (e >= num_experts) return -1;
    const bool routed = masks[e] >> j & 1;
    if (!kPadded && !routed) return -1;
    const int64_t row = first_rows[e] + __popcll(masks[e] & ((uint64_t{1} << j) - 1));  // routed ones before
    if (!kPadded) return row < max_rows ? row : -1;
    const int64_t place = routed ? row : expert_totals[e] + (first_token + j - row);
    return place < capacity ? e * capacity + place : -1;
  };

  // Warps take tokens in turn, lanes take experts; all lanes of a warp run the same number of steps.
  for (int j = warp; j < tokens; j += kBlockThreads / kWarp) {
    int entries = 0;
    for (int base = 0; base < num_experts; base += kWarp) {
      entries += __popc(__ballot_sync(kAllLanes, row_of(j, base + lane) >= 0));
    }
    if (lane == 0) token_entries[j] = entries;
  }
  __syncthreads();
  const int j = threadIdx.x;
  const int64_t own_entries = j < tokens ? token_entries[j] : 0;
  const BlockSum entries = block_sum(own_entries);
  if (j < tokens) {
    token_entries[j] = first_entry + entries.inclusive - own_entries;
    offsets[first_token + j] = token_entries[j];
    if (first_token + j == num_tokens - 1) offsets[num_tokens] = first_entry + entries.total;
  }
  __syncthreads();

  for (int j = warp; j < tokens; j += kBlockThreads / kWarp) {
    int64_t next = token_entries[j];
    for (int base = 0; base < num_experts; base += kWarp) {
      const int64_t row = row_of(j, base + lane);
      const unsigned kept = __ballot_sync(kAllLanes, row >= 0);
      if (row >= 0) {
        const int64_t entry = next + __popc(kept & ((1u << lane) - 1));
        rows[entry] = row;
        experts[entry] = base + lane;
        sources[row] = first_token + j;
      }
      next += __popc(kept);
    }
  }
}

// counts[t] = rows of token t. Integer atomics: the sums do not depend on their order.
__global__ void __launch_bounds__(kBlockThreads)
    count_sources_kernel(const int64_t* __restrict__ sources, int64_t num_rows, int64_t num_tokens,
                         unsigned long long* __restrict__ counts) {
  const int64_t row = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  if (row >= num_rows) return;
  const int64_t token = sources[row];
  if (token >= 0 && token < num_tokens) atomicAdd(&counts[token], 1ull);
}

// block_totals[b] = rows of the tokens of block b.
__global__ void __launch_bounds__(kBlockThreads)
    sum_counts_kernel(const int64_t* __restrict__ counts, int64_t num_tokens, int64_t* __restrict__ block_totals) {
  const int64_t token = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  const BlockSum sum = block_sum(token < num_tokens ? counts[token] : 0);
  if (threadIdx.x == 0) block_totals[blockIdx.x] = sum.total;
}

// offsets = exclusive sum of counts. Each block adds up the totals before it: no chain from block to block.
__global__ void __launch_bounds__(kBlockThreads)
    scan_counts_kernel(const int64_t* __restrict__ counts, const int64_t* __restrict__ block_totals, int64_t num_tokens,
                       int64_t* __restrict__ offsets) {
  int64_t earlier = 0;
  for (int64_t b = threadIdx.x; b < blockIdx.x; b += kBlockThreads) earlier += block_totals[b];
  earlier = block_sum(earlier).total;
  const int64_t token = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  const int64_t count = token < num_tokens ? counts[token] : 0;
  const int64_t end = earlier + block_sum(count).inclusive;
  if (token < num_tokens) offsets[token] = end - count;
  if (token == num_tokens - 1) offsets[num_tokens] = end;
}

// unordered[offsets[t] .. offsets[t + 1]) = the rows of token t, in any order; uses counts up.
__global__ void __launch_bounds__(kBlockThreads)
    collect_rows_kernel(const int64_t* __restrict__ sources, int64_t num_rows, int64_t num_tokens,
                        const int64_t* __restrict__ offsets, unsigned long long* __restrict__ counts,
                        int64_t* __restrict__ unordered) {
  const int64_t row = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  if (row >= num_rows) return;
  const int64_t token = sources[row];
  if (token < 0 || token >= num_tokens) return;
  const int64_t left = static_cast<int64_t>(atomicAdd(&counts[token], ~0ull));  // subtracts one
  unordered[offsets[token] + left - 1] = row;
}

// Puts each row at its rank among the rows of its token: whatever order collect_rows_kernel found, one result.
__global__ void __launch_bounds__(kBlockThreads)
    order_rows_kernel(const int64_t* __restrict__ sources, int64_t num_rows, int64_t num_tokens,
                      int64_t rows_per_expert, const int64_t* __restrict__ offsets,
                      const int64_t* __restrict__ unordered, int64_t* __restrict__ rows,
                      int32_t* __restrict__ experts) {
  const int64_t row = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  if (row >= num_rows) return;
  const int64_t token = sources[row];
  if (token < 0 || token >= num_tokens) return;
  int64_t entry = offsets[token];
  const int64_t end = offsets[token + 1];
  int64_t rank = 0;
  for (int64_t other = entry; other < end; ++other) rank += unordered[other] < row;
  entry += rank;
  rows[entry] = row;
  if (experts != nullptr) experts[entry] = static_cast<int32_t>(row / rows_per_expert);
}

}  // namespace

// Masks and rows before for each tile, and one total an expert.
int64_t row_map_scratch_bytes(int64_t num_tokens, int64_t num_experts) {
  return (2 * divide_up(num_tokens, kTileTokens) + 1) * num_experts * sizeof(int64_t);
}

void build_row_map(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts, int64_t max_rows,
                   std::optional<int64_t> capacity, int64_t* offsets, int64_t* rows, int32_t* experts, int64_t* sources,
                   int64_t* expert_counts, void* scratch, void* stream) {
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (num_tokens == 0 || num_experts == 0) {
    check(cudaMemsetAsync(offsets, 0, (num_tokens + 1) * sizeof(int64_t), cuda_stream), "memset of offsets");
    if (num_experts > 0 && expert_counts != nullptr) {
      check(cudaMemsetAsync(expert_counts, 0, num_experts * sizeof(int64_t), cuda_stream), "memset of counts");
    }
    return;
  }
  const int64_t num_tiles = divide_up(num_tokens, kTileTokens);
  const unsigned tile_blocks = grid_blocks(num_tiles, "build_row_map");
  uint64_t* masks = static_cast<uint64_t*>(scratch);
  int64_t* rows_before = static_cast<int64_t*>(scratch) + num_tiles * num_experts;
  int64_t* expert_totals = rows_before + num_tiles * num_experts;

  const dim3 pack_grid(tile_blocks, static_cast<unsigned>(divide_up(num_experts, kBlockThreads)));
  pack_masks_kernel<<<pack_grid, kBlockThreads, 0, cuda_stream>>>(routing_map, num_tokens, num_experts, masks);
  check(cudaGetLastError(), "pack_masks_kernel");

  const unsigned scan_blocks = static_cast<unsigned>(divide_up(num_experts, kWarp));
  scan_tiles_kernel<<<scan_blocks, kWarp * kScanWarps, 0, cuda_stream>>>(masks, num_tiles, num_experts, rows_before,
                                                                         expert_totals);
  check(cudaGetLastError(), "scan_tiles_kernel");

  const int64_t shared_bytes = num_experts * kEntryBytes;
  const auto fill = [&](auto padded) {
    if (shared_bytes > kDefaultSharedBytes) {
      // Refused where the device has too little: about 10,000 experts on sm_80 (163 KiB), 14,000 on sm_90 (227 KiB).
      check(cudaFuncSetAttribute(fill_rows_kernel<padded>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(std::min<int64_t>(shared_bytes, INT32_MAX))),
            "build_row_map: shared memory for this number of experts");
    }
    fill_rows_kernel<padded><<<tile_blocks, kBlockThreads, shared_bytes, cuda_stream>>>(
        masks, rows_before, expert_totals, num_tokens, static_cast<int>(num_experts), max_rows, capacity.value_or(0),
        offsets, rows, experts, sources, expert_counts);
    check(cudaGetLastError(), "fill_rows_kernel");
  };
  if (capacity) {
    fill(std::true_type{});
  } else {
    fill(std::false_type{});
  }
}

// A count a token, a total a block of tokens, the rows before they are ordered.
int64_t sources_scratch_bytes(int64_t num_rows, int64_t num_tokens) {
  return (num_tokens + divide_up(num_tokens, kBlockThreads) + num_rows) * sizeof(int64_t);
}

void build_row_map_from_sources(const int64_t* sources, int64_t num_rows, int64_t num_tokens, int64_t rows_per_expert,
                                int64_t* offsets, int64_t* rows, int32_t* experts, void* scratch, void* stream) {
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (num_tokens == 0 || num_rows == 0) {
    check(cudaMemsetAsync(offsets, 0, (num_tokens + 1) * sizeof(int64_t), cuda_stream), "memset of offsets");
    return;
  }
  const unsigned token_blocks = grid_blocks(divide_up(num_tokens, kBlockThreads), "build_row_map_from_sources");
  const unsigned row_blocks = grid_blocks(divide_up(num_rows, kBlockThreads), "build_row_map_from_sources");
  int64_t* counts = static_cast<int64_t*>(scratch);
  int64_t* block_totals = counts + num_tokens;
  int64_t* unordered = block_totals + token_blocks;
  unsigned long long* atomic_counts = reinterpret_cast<unsigned long long*>(counts);

  check(cudaMemsetAsync(counts, 0, num_tokens * sizeof(int64_t), cuda_stream), "memset of counts");
  count_sources_kernel<<<row_blocks, kBlockThreads, 0, cuda_stream>>>(sources, num_rows, num_tokens, atomic_counts);
  check(cudaGetLastError(), "count_sources_kernel");
  sum_counts_kernel<<<token_blocks, kBlockThreads, 0, cuda_stream>>>(counts, num_tokens, block_totals);
  check(cudaGetLastError(), "sum_counts_kernel");
  scan_counts_kernel<<<token_blocks, kBlockThreads, 0, cuda_stream>>>(counts, block_totals, num_tokens, offsets);
  check(cudaGetLastError(), "scan_counts_kernel");
  collect_rows_kernel<<<row_blocks, kBlockThreads, 0, cuda_stream>>>(sources, num_rows, num_tokens, offsets,
                                                                     atomic_counts, unordered);
  check(cudaGetLastError(), "collect_rows_kernel");
  order_rows_kernel<<<row_blocks, kBlockThreads, 0, cuda_stream>>>(sources, num_rows, num_tokens, rows_per_expert,
                                                                   offsets, unordered, rows, experts);
  check(cudaGetLastError(), "order_rows_kernel");
}

}  // namespace cuda
}  // namespace moe_opt
