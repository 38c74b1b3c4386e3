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

constexpr int kTileTokens = 64;  // bits of a mask
constexpr int kPartTokens = 8;   // of which a thread packs: a byte
constexpr int kTileParts = kTileTokens / kPartTokens;
constexpr int kScanWarps = 32;                             // warps that share the tiles of 32 experts
constexpr int kRankedRows = kBlockThreads;                 // of a token, up to which a row is compared with all others
constexpr int64_t kEntryBytes = 2 * sizeof(int64_t);       // shared memory an expert takes in fill_rows_kernel
constexpr int64_t kDefaultSharedBytes = 48 * 1024 - 1024;  // without an opt-in, less the static part

// masks[tile, e]: bit j = token 64 * tile + j goes to expert e. A thread packs eight tokens of an expert, a byte of the
// mask (the device's words begin with their lowest byte); neighbouring threads take neighbouring experts.
__global__ void __launch_bounds__(kBlockThreads)
    pack_masks_kernel(const uint8_t* __restrict__ routing_map, int64_t num_tokens, int64_t num_experts,
                      int64_t num_parts, uint8_t* __restrict__ masks) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t part = thread / num_experts, expert = thread % num_experts;
  if (part >= num_parts) return;
  const int64_t first = part * kPartTokens;
  const int tokens = static_cast<int>(max(int64_t{0}, min(int64_t{kPartTokens}, num_tokens - first)));
  const uint8_t* column = routing_map + first * num_experts + expert;
  unsigned mask = 0;
#pragma unroll
  for (int j = 0; j < kPartTokens; ++j) {
    if (j < tokens) mask |= unsigned{column[j * num_experts] != 0} << j;
  }
  masks[((part / kTileParts) * num_experts + expert) * kTileParts + part % kTileParts] = static_cast<uint8_t>(mask);
}

// rows_before[tile, e] = tokens of expert e in earlier tiles; expert_totals[e] = tokens of expert e in all tiles.
// A block takes 32 experts (x), one a lane, and tiles_a_block tiles (y), of which its warps take consecutive ranges. It
// counts the tiles of earlier blocks itself: all read the masks, and none waits for another.
__global__ void __launch_bounds__(kWarp* kScanWarps)
    scan_tiles_kernel(const uint64_t* __restrict__ masks, int64_t num_tiles, int64_t tiles_a_block, int64_t num_experts,
                      int64_t* __restrict__ rows_before, int64_t* __restrict__ expert_totals) {
  __shared__ int64_t totals[kScanWarps][kWarp];
  __shared__ int64_t earlier[kScanWarps][kWarp];  // of earlier blocks' tiles, a share a warp
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t expert = int64_t{blockIdx.x} * kWarp + lane;
  const bool any = expert < num_experts;
  const int64_t first = int64_t{blockIdx.y} * tiles_a_block, last = min(num_tiles, first + tiles_a_block);
  const int64_t tiles_a_warp = divide_up(tiles_a_block, kScanWarps);
  const int64_t begin = min(last, first + warp * tiles_a_warp);
  const int64_t end = any ? min(last, begin + tiles_a_warp) : begin;

  int64_t total = 0, other = 0;
#pragma unroll 8
  for (int64_t tile = begin; tile < end; ++tile) total += __popcll(masks[tile * num_experts + expert]);
#pragma unroll 8
  for (int64_t tile = warp; tile < (any ? first : 0); tile += kScanWarps) {
    other += __popcll(masks[tile * num_experts + expert]);
  }
  totals[warp][lane] = total;
  earlier[warp][lane] = other;
  __syncthreads();

  int64_t before = 0;
  for (int w = 0; w < kScanWarps; ++w) before += earlier[w][lane];
  for (int w = 0; w < warp; ++w) before += totals[w][lane];
#pragma unroll 8
  for (int64_t tile = begin; tile < end; ++tile) {
    rows_before[tile * num_experts + expert] = before;
    before += __popcll(masks[tile * num_experts + expert]);
  }
  if (warp == kScanWarps - 1 && last == num_tiles && any) expert_totals[expert] = before;
}

// One block for tokens_a_block tokens, of one tile: turns totals into first rows, counts the kept rows of its tokens,
// writes their entries. expert_counts[e] = tokens of expert e, written by the first block.
// Where kPadded, every expert owns `capacity` rows: its routed tokens first, then the lowest of the others.
// Dynamic shared memory: first_rows [E], masks [E].
template <bool kPadded>
__global__ void __launch_bounds__(kBlockThreads, 4)  // more would have to spill registers
    fill_rows_kernel(const uint64_t* __restrict__ tile_masks, const int64_t* __restrict__ rows_before,
                     const int64_t* __restrict__ expert_totals, int64_t num_tokens, int tokens_a_block, int num_experts,
                     int64_t max_rows, int64_t capacity, int64_t* __restrict__ offsets, int64_t* __restrict__ rows,
                     int32_t* __restrict__ experts, int64_t* __restrict__ sources,
                     int64_t* __restrict__ expert_counts) {
  extern __shared__ int64_t shared[];
  int64_t* first_rows = shared;  // the first row of this block for each expert; where kPadded, among its expert's rows
  uint64_t* masks = reinterpret_cast<uint64_t*>(shared + num_experts);  // of this block's tokens, from bit 0 on
  __shared__ int64_t token_entries[kTileTokens];                        // kept rows of each token, then its first entry

  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t first_token = int64_t{blockIdx.x} * tokens_a_block;
  const int tokens = static_cast<int>(min(int64_t{tokens_a_block}, num_tokens - first_token));
  const int64_t tile = first_token / kTileTokens;
  const int first_bit = static_cast<int>(first_token % kTileTokens);

  // Exclusive sum of expert_totals, and the entries that the tokens of earlier blocks own.
  int64_t rows_of_earlier_experts = 0;
  int64_t earlier_entries = 0;
  for (int base = 0; base < num_experts; base += kBlockThreads) {
    const int e = base + static_cast<int>(threadIdx.x);
    const int64_t total = e < num_experts ? expert_totals[e] : 0;
    const BlockSum sum = block_sum(total);
    const int64_t expert_row = rows_of_earlier_experts + sum.inclusive - total;
    rows_of_earlier_experts += sum.total;
    if (e < num_experts) {
      const uint64_t mask = tile_masks[tile * num_experts + e];
      const int64_t before = rows_before[tile * num_experts + e] + __popcll(mask & ((uint64_t{1} << first_bit) - 1));
      const int64_t room = kPadded ? capacity : max(int64_t{0}, max_rows - expert_row);
      first_rows[e] = kPadded ? before : expert_row + before;
      masks[e] = mask >> first_bit;
      earlier_entries += min(before, room);
      if (kPadded) earlier_entries += min(first_token - before, max(int64_t{0}, capacity - total));
      if (!kPadded && blockIdx.x == 0) expert_counts[e] = total;
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
  for (int j = warp; j < tokens; j += kBlockWarps) {
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
  if (!kPadded && first_token + tokens == num_tokens) {
    // Fewer entries than promised, where logits are NaN: what is left over must not point anywhere else.
    for (int64_t entry = first_entry + entries.total + threadIdx.x; entry < max_rows; entry += kBlockThreads) {
      rows[entry] = entry;
      sources[entry] = experts[entry] = 0;
    }
  }
  __syncthreads();

  for (int j = warp; j < tokens; j += kBlockWarps) {
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

// unordered[offsets[t] .. offsets[t + 1]) = the rows of token t, in any order; uses counts up, to 0.
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

// Sorts `rows` numbers below 2^bits in ascending order, by their bits, the lowest first: each pass keeps the order
// among those with equal bits. One block; every thread calls it. Returns where the result lies: `from`, or `to`, which
// holds as many.
__device__ int64_t* sort_by_bits(int64_t* from, int64_t* to, int64_t rows, int bits) {
  for (int bit = 0; bit < bits; ++bit) {
    int64_t zeros = 0;
    for (int64_t i = threadIdx.x; i < rows; i += kBlockThreads) zeros += ~from[i] >> bit & 1;
    int64_t next_zero = 0, next_one = block_sum(zeros).total;
    for (int64_t base = 0; base < rows; base += kBlockThreads) {
      const int64_t i = base + threadIdx.x;
      const int64_t row = i < rows ? from[i] : -1;
      const int64_t one = i < rows ? row >> bit & 1 : 0, zero = i < rows ? 1 - one : 0;
      const BlockSum ones = block_sum(one), nulls = block_sum(zero);
      if (i < rows) to[one ? next_one + ones.inclusive - 1 : next_zero + nulls.inclusive - 1] = row;
      next_one += ones.total;
      next_zero += nulls.total;
    }
    __syncthreads();
    int64_t* const sorted = to;
    to = from;
    from = sorted;
  }
  return from;
}

// Puts the rows of each token in ascending order: whatever order collect_rows_kernel found, one result. A row of a
// token that has few finds its rank among them; the rows of one that has many are sorted by the block that comes to
// them first, so that the work grows with the number of rows, not with its square. taken: 0 for each token, and used
// up. Row numbers are below 2^row_bits.
__global__ void __launch_bounds__(kBlockThreads)
    order_rows_kernel(const int64_t* __restrict__ sources, int64_t num_rows, int64_t num_tokens,
                      int64_t rows_per_expert, int row_bits, const int64_t* __restrict__ offsets,
                      unsigned long long* __restrict__ taken, int64_t* unordered, int64_t* rows,
                      int32_t* __restrict__ experts) {
  __shared__ int64_t long_tokens[kBlockThreads];
  __shared__ int num_long;
  const int64_t row = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  if (threadIdx.x == 0) num_long = 0;
  __syncthreads();
  const int64_t token = row < num_rows ? sources[row] : -1;
  if (token >= 0 && token < num_tokens) {
    const int64_t begin = offsets[token], end = offsets[token + 1];
    if (end - begin > kRankedRows) {
      if (atomicAdd(&taken[token], 1ull) == 0) long_tokens[atomicAdd(&num_long, 1)] = token;
    } else {
      int64_t entry = begin;
      for (int64_t other = begin; other < end; ++other) entry += unordered[other] < row;
      rows[entry] = row;
      if (experts != nullptr) experts[entry] = static_cast<int32_t>(row / rows_per_expert);
    }
  }
  __syncthreads();
  for (int t = 0; t < num_long; ++t) {
    const int64_t begin = offsets[long_tokens[t]], count = offsets[long_tokens[t] + 1] - begin;
    const int64_t* sorted = sort_by_bits(unordered + begin, rows + begin, count, row_bits);
    for (int64_t i = threadIdx.x; i < count; i += kBlockThreads) {
      const int64_t value = sorted[i];
      rows[begin + i] = value;
      if (experts != nullptr) experts[begin + i] = static_cast<int32_t>(value / rows_per_expert);
    }
  }
}

// cut[i] = the row of entry i in chunk order, see cpu::cut_rows; a thread an entry. Every block adds up the parts of
// each chunk itself. Dynamic shared memory: first_rows [E].
__global__ void __launch_bounds__(kBlockThreads)
    cut_rows_kernel(const int64_t* __restrict__ rows, const int32_t* __restrict__ experts,
                    const int64_t* __restrict__ expert_counts, int64_t num_rows, int num_experts, int64_t num_chunks,
                    int64_t* __restrict__ cut) {
  extern __shared__ int64_t first_rows[];
  // Writes the exclusive sum of size(rows of the expert) over experts, from `row` on, and returns where it ends.
  const auto add_up = [&](int64_t row, auto size) {
    for (int base = 0; base < num_experts; base += kBlockThreads) {
      const int e = base + static_cast<int>(threadIdx.x);
      const int64_t own = e < num_experts ? size(expert_counts[e]) : 0;
      const BlockSum sum = block_sum(own);
      if (e < num_experts) first_rows[e] = row + sum.inclusive - own;  // block_sum waits for those who read it before
      row += sum.total;
    }
    __syncthreads();
    return row;
  };
  add_up(0, [](int64_t count) { return count; });
  const int64_t entry = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  const bool any = entry < num_rows;
  const int expert = any ? experts[entry] : 0;
  const int64_t row = any ? rows[entry] : 0, count = expert_counts[expert];
  const int64_t index = row - first_rows[expert];
  const bool left_over = index < 0 || index >= count;
  const int64_t chunk = left_over ? -1 : ((index + 1) * num_chunks - 1) / count;
  int64_t cut_row = row, chunk_row = 0;
  for (int64_t c = 0; c < num_chunks; ++c) {
    chunk_row = add_up(chunk_row, [&](int64_t n) { return n * (c + 1) / num_chunks - n * c / num_chunks; });
    if (c == chunk) cut_row = first_rows[expert] + index - count * c / num_chunks;
  }
  if (any) cut[entry] = min(cut_row, num_rows - 1);  // where rows of these counts were cut off
}

// Lets a kernel have this much dynamic shared memory; refused where the device has too little.
template <typename Kernel>
void allow_shared(Kernel* kernel, int64_t bytes, const char* what) {
  if (bytes <= kDefaultSharedBytes) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(std::min<int64_t>(bytes, INT32_MAX))),
        what);
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
  // Enough blocks for every multiprocessor, as far as there is work: small layers are cut finer.
  const int64_t wanted = multiprocessors();
  const int64_t num_tiles = divide_up(num_tokens, kTileTokens);
  uint64_t* masks = static_cast<uint64_t*>(scratch);
  int64_t* rows_before = static_cast<int64_t*>(scratch) + num_tiles * num_experts;
  int64_t* expert_totals = rows_before + num_tiles * num_experts;

  const int64_t num_parts = num_tiles * kTileParts;
  int pack_threads = kBlockThreads;
  while (pack_threads > kWarp && divide_up(num_parts * num_experts, pack_threads) < wanted) pack_threads /= 2;
  pack_masks_kernel<<<grid_blocks(divide_up(num_parts * num_experts, pack_threads), "build_row_map"), pack_threads, 0,
                      cuda_stream>>>(routing_map, num_tokens, num_experts, num_parts,
                                     reinterpret_cast<uint8_t*>(masks));
  check(cudaGetLastError(), "pack_masks_kernel");

  const unsigned expert_blocks = static_cast<unsigned>(divide_up(num_experts, kWarp));
  const int64_t tiles_a_block = std::max<int64_t>(1, num_tiles / divide_up(wanted, expert_blocks));
  const dim3 scan_grid(expert_blocks, static_cast<unsigned>(divide_up(num_tiles, tiles_a_block)));
  scan_tiles_kernel<<<scan_grid, kWarp * kScanWarps, 0, cuda_stream>>>(masks, num_tiles, tiles_a_block, num_experts,
                                                                       rows_before, expert_totals);
  check(cudaGetLastError(), "scan_tiles_kernel");

  int tokens_a_block = kTileTokens;  // one for each warp at least
  while (tokens_a_block > kBlockWarps && divide_up(num_tokens, tokens_a_block) < wanted) tokens_a_block /= 2;
  const unsigned fill_blocks = grid_blocks(divide_up(num_tokens, tokens_a_block), "build_row_map");
  const int64_t shared_bytes = num_experts * kEntryBytes;
  const auto fill = [&](auto padded) {
    // Refused from about 10,000 experts on, on sm_80 (163 KiB), from 14,000 on sm_90 (227 KiB).
    allow_shared(fill_rows_kernel<padded>, shared_bytes, "build_row_map: shared memory for this number of experts");
    fill_rows_kernel<padded><<<fill_blocks, kBlockThreads, shared_bytes, cuda_stream>>>(
        masks, rows_before, expert_totals, num_tokens, tokens_a_block, static_cast<int>(num_experts), max_rows,
        capacity.value_or(0), offsets, rows, experts, sources, expert_counts);
    check(cudaGetLastError(), "fill_rows_kernel");
  };
  if (capacity) {
    fill(std::true_type{});
  } else {
    fill(std::false_type{});
  }
}

void cut_rows(const int64_t* rows, const int32_t* experts, const int64_t* expert_counts, int64_t num_rows,
              int64_t num_experts, int64_t num_chunks, int64_t* cut, void* stream) {
  if (num_rows == 0) return;
  const unsigned blocks = grid_blocks(divide_up(num_rows, kBlockThreads), "cut_rows");
  const int64_t shared_bytes = num_experts * sizeof(int64_t);
  allow_shared(cut_rows_kernel, shared_bytes, "cut_rows: shared memory for this number of experts");
  cut_rows_kernel<<<blocks, kBlockThreads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(
      rows, experts, expert_counts, num_rows, static_cast<int>(num_experts), num_chunks, cut);
  check(cudaGetLastError(), "cut_rows_kernel");
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
  int row_bits = 0;
  while (num_rows - 1 >> row_bits > 0) ++row_bits;
  order_rows_kernel<<<row_blocks, kBlockThreads, 0, cuda_stream>>>(sources, num_rows, num_tokens, rows_per_expert,
                                                                   row_bits, offsets, atomic_counts, unordered, rows,
                                                                   experts);  // whose counts are used up
  check(cudaGetLastError(), "order_rows_kernel");
}

}  // namespace cuda
}  // namespace moe_opt
