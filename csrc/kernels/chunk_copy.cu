// Chunk copy on CUDA: each block takes an equal, consecutive share of all rows laid end to end, whatever the sizes of
// the chunks, so one large chunk does not leave the other blocks idle. A block finds its first chunk by summing the
// row counts before it and then walks from chunk to chunk.
#include "chunk_copy.h"
#include "cuda_common.cuh"
#include "wire_format.cuh"

namespace moe_opt {
namespace cuda {
namespace {

constexpr int kCopyUnits = 4;                     // units a thread requests together
constexpr int64_t kBytesPerBlock = 64 * 1024;     // least work worth a block
constexpr int64_t kMaxBlocks = 2048;              // several for every multiprocessor; each reads the row counts
constexpr int64_t kMaxLanes = kBlockThreads / 2;  // threads that share a row, at most

// Calls move(source row, target row) for the rows of this block's share that are its slot's: one in `slots`.
template <typename Move>
__device__ __forceinline__ void for_rows(const ChunkList& chunks, int64_t num_rows, int64_t rows_per_block, int slot,
                                         int slots, Move move) {
  __shared__ int64_t found_chunk;
  __shared__ int64_t found_first;
  int64_t flat = blockIdx.x * rows_per_block;  // the row to move next, counted over all chunks
  const int64_t end = min(num_rows, flat + rows_per_block);

  // The chunk that holds row `flat`, and that chunk's first row. Exactly one thread's chunk matches.
  if (threadIdx.x == 0) found_chunk = chunks.num_chunks;
  int64_t first = 0;
  for (int64_t base = 0; base < chunks.num_chunks && first <= flat; base += blockDim.x) {
    const int64_t chunk = base + threadIdx.x;
    const int64_t count = chunk < chunks.num_chunks ? chunks.row_counts[chunk] : 0;
    const BlockSum sum = block_sum(count);
    const int64_t chunk_end = first + sum.inclusive;
    if (chunk_end - count <= flat && flat < chunk_end) {
      found_chunk = chunk;
      found_first = chunk_end - count;
    }
    first += sum.total;
  }
  __syncthreads();

  int64_t within = found_chunk < chunks.num_chunks ? flat - found_first : 0;  // row of the chunk
  for (int64_t chunk = found_chunk; chunk < chunks.num_chunks && flat < end; ++chunk, within = 0) {
    const int64_t rows = min(chunks.row_counts[chunk] - within, end - flat);
    const int64_t from = chunks.source_rows[chunk] + within, to = chunks.target_rows[chunk] + within;
    for (int64_t row = slot; row < rows; row += slots) move(from + row, to + row);
    flat += rows;
  }
}

// A thread of a row's `lanes` threads (a power of two) moves units lane, lane + lanes, ...; a block moves
// blockDim.x / lanes rows side by side. Unit: what one access moves; a row is `units` of them.
template <typename Unit>
__global__ void __launch_bounds__(kBlockThreads)
    copy_chunks_kernel(ChunkList chunks, int64_t num_rows, int64_t rows_per_block, int64_t units, int lanes,
                       const char* __restrict__ source, int64_t source_stride, char* __restrict__ target,
                       int64_t target_stride) {
  const int lane = threadIdx.x % lanes;
  const int slots = static_cast<int>(blockDim.x) / lanes;
  for_rows(chunks, num_rows, rows_per_block, threadIdx.x / lanes, slots, [&](int64_t from, int64_t to) {
    const Unit* from_row = reinterpret_cast<const Unit*>(source + from * source_stride);
    Unit* to_row = reinterpret_cast<Unit*>(target + to * target_stride);
    for (int64_t base = lane; base < units; base += int64_t{lanes} * kCopyUnits) {
      Unit values[kCopyUnits];
#pragma unroll
      for (int u = 0; u < kCopyUnits; ++u) {
        const int64_t index = base + int64_t{u} * lanes;
        if (index < units) values[u] = __ldcs(from_row + index);
      }
#pragma unroll
      for (int u = 0; u < kCopyUnits; ++u) {
        const int64_t index = base + int64_t{u} * lanes;
        if (index < units) __stcs(to_row + index, values[u]);
      }
    }
  });
}

// The same for rows of two formats, by pieces.
template <typename From, typename To>
__global__ void __launch_bounds__(kBlockThreads)
    convert_chunks_kernel(ChunkList chunks, int64_t num_rows, int64_t rows_per_block, int lanes, Side source,
                          Side target) {
  const int slots = static_cast<int>(blockDim.x) / lanes;
  for_rows(chunks, num_rows, rows_per_block, threadIdx.x / lanes, slots, [&](int64_t from, int64_t to) {
    for (int64_t piece = hidden_from_compiler(threadIdx.x % lanes); is_called<To>(target, piece); piece += lanes) {
      float values[kPiece];
      read_piece<From>(source, from, piece, values);
      const auto packed = To::narrow(values);
      To::store(packed, target, target.row(to), piece);
    }
  });
}

// How many threads share a row of `items`, a power of two, and how many rows a block moves, whose rows are row_bytes.
struct Shares {
  int lanes;
  int64_t rows_per_block;
};
Shares shares_of(int64_t num_rows, int64_t items, int64_t items_a_thread, int64_t row_bytes, int least_lanes) {
  int lanes = least_lanes;
  while (lanes < kMaxLanes && lanes * items_a_thread < items) lanes *= 2;
  const int64_t slots = kBlockThreads / lanes;
  // At most a row a thread where rows are narrow (columns of a few bytes): such reads wait for a sector each.
  const int64_t worth_a_block = std::min<int64_t>(kBytesPerBlock / row_bytes, kBlockThreads);
  const int64_t least_rows = divide_up(std::max(slots, worth_a_block), slots) * slots;
  return {lanes, std::max(least_rows, divide_up(divide_up(num_rows, kMaxBlocks), slots) * slots)};
}

}  // namespace

void copy_chunks(const ChunkList& chunks, int64_t row_bytes, ConstRows source, MutableRows target, int64_t num_rows,
                 void* stream) {
  if (num_rows == 0 || row_bytes == 0) return;
  const auto fits = [&](int64_t bytes) { return row_bytes % bytes == 0 && rows_aligned(bytes, source, target); };
  with_unit<kVectorBytes, 4, 2, 1>(fits, [&](auto unit) {
    using Unit = decltype(unit);
    const int64_t units = row_bytes / static_cast<int64_t>(sizeof(Unit));
    const auto [lanes, rows_per_block] = shares_of(num_rows, units, kCopyUnits, row_bytes, 1);
    const unsigned blocks = grid_blocks(divide_up(num_rows, rows_per_block), "copy_chunks");
    copy_chunks_kernel<Unit><<<blocks, kBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        chunks, num_rows, rows_per_block, units, lanes, static_cast<const char*>(source.data), source.stride_bytes,
        static_cast<char*>(target.data), target.stride_bytes);
    check(cudaGetLastError(), "copy_chunks_kernel");
  });
}

void convert_chunks(const ChunkList& chunks, DType from, DType to, int64_t hidden, ConstRows source, MutableRows target,
                    int64_t num_rows, void* stream) {
  if (num_rows == 0 || hidden == 0) return;
  with_formats<false>(from, to, [&](auto of_source, auto of_target) {
    using To = decltype(of_target);
    const auto [lanes, rows_per_block] =
        shares_of(num_rows, divide_up(hidden, kPiece), 1, payload_bytes(from, hidden), To::kTogether);
    const unsigned blocks = grid_blocks(divide_up(num_rows, rows_per_block), "convert_chunks");
    convert_chunks_kernel<decltype(of_source), To><<<blocks, kBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        chunks, num_rows, rows_per_block, lanes, side_of(from, hidden, source), side_of(to, hidden, target));
    check(cudaGetLastError(), "convert_chunks_kernel");
  });
}

}  // namespace cuda
}  // namespace moe_opt
