// Conversions of rows on CUDA, and the sums that read one format and write another. A block has a row, or a token: it
// reads every byte once, converts in registers, and writes once; a token that goes to several rows is converted once.
#include "permute.h"
#include "wire_format.cuh"

namespace moe_opt {
namespace cuda {
namespace {

constexpr int kRowsHeld = 4;  // rows whose pieces a thread requests together

int piece_threads(int64_t hidden) { return row_threads(divide_up(hidden, kPiece), 1); }

// grid: rows of the target.
template <typename From, typename To>
__global__ void __launch_bounds__(kBlockThreads)
    convert_rows_kernel(Side source, const int64_t* __restrict__ sources, Side target) {
  const int64_t row = sources == nullptr ? int64_t{blockIdx.x} : sources[blockIdx.x];
  for (int64_t piece = threadIdx.x; is_called<To>(target, piece); piece += blockDim.x) {
    float values[kPiece];
    read_piece<From>(source, row, piece, values);
    const auto packed = To::narrow(values);
    To::store(packed, target, target.row(blockIdx.x), piece);
  }
}

// The lanes that hold probabilities behind the payload: see ProbLanes in permute.cu; by bytes, as 16 of a row matter
// little beside its payload.
struct ByteLanes {
  char* data;
  int64_t stride_bytes;
  int64_t lane_bytes;
  int64_t prob_bytes;
};

// As permute_rows_kernel, to rows of another format. grid: T.
template <typename From, typename To>
__global__ void __launch_bounds__(kBlockThreads)
    permute_wire_kernel(const int64_t* __restrict__ offsets, const int64_t* __restrict__ rows,
                        const int32_t* __restrict__ experts, int64_t num_experts, Side tokens, Side permuted,
                        const char* __restrict__ probs, ByteLanes lanes) {
  const int64_t token = blockIdx.x;
  const int64_t first = offsets[token], last = offsets[token + 1];
  if (first == last) return;
  for (int64_t piece = threadIdx.x; is_called<To>(permuted, piece); piece += blockDim.x) {
    float values[kPiece];
    read_piece<From>(tokens, token, piece, values);
    const auto packed = To::narrow(values);
    for (int64_t entry = first; entry < last; ++entry) {
      To::store(packed, permuted, permuted.row(rows[entry]), piece);
    }
  }
  for (int64_t i = threadIdx.x; i < (last - first) * lanes.lane_bytes; i += blockDim.x) {
    const int64_t entry = first + i / lanes.lane_bytes, byte = i % lanes.lane_bytes;
    const int64_t prob = (token * num_experts + experts[entry]) * lanes.prob_bytes;
    lanes.data[rows[entry] * lanes.stride_bytes + byte] = byte < lanes.prob_bytes ? probs[prob + byte] : 0;
  }
}

// out[t] = 0 + the rows of t, ascending, in float32. grid: T.
template <typename From, typename To>
__global__ void __launch_bounds__(kBlockThreads, 2)
    sum_wire_rows_kernel(const int64_t* __restrict__ offsets, const int64_t* __restrict__ rows, Side permuted,
                         Side tokens) {
  const int64_t token = blockIdx.x;
  const int64_t first = offsets[token], last = offsets[token + 1];
  for (int64_t piece = threadIdx.x; is_called<To>(tokens, piece); piece += blockDim.x) {
    float total[kPiece] = {};
    for (int64_t entry = first; entry < last && piece * kPiece < tokens.hidden; entry += kRowsHeld) {
      int64_t row[kRowsHeld];  // all known before the first of them is read
#pragma unroll
      for (int r = 0; r < kRowsHeld; ++r) row[r] = entry + r < last ? rows[entry + r] : -1;
      typename From::Packed held[kRowsHeld];
#pragma unroll
      for (int r = 0; r < kRowsHeld; ++r) {
        if (row[r] >= 0) held[r] = From::load(permuted, permuted.row(row[r]), piece);
      }
#pragma unroll
      for (int r = 0; r < kRowsHeld; ++r) {
        if (row[r] < 0) continue;
        float values[kPiece];
        From::widen(held[r], values);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) total[i] = __fadd_rn(total[i], values[i]);
      }
    }
    const auto packed = To::narrow(total);
    To::store(packed, tokens, tokens.row(token), piece);
  }
}

}  // namespace

void convert_rows(DType from, DType to, int64_t hidden, ConstRows source, const int64_t* sources, MutableRows target,
                  int64_t num_rows, void* stream) {
  if (num_rows == 0 || hidden == 0) return;
  const unsigned blocks = grid_blocks(num_rows, "convert_rows");
  const Side in = side_of(from, hidden, source), out = side_of(to, hidden, target);
  with_formats<false>(from, to, [&](auto of_source, auto of_target) {
    convert_rows_kernel<decltype(of_source), decltype(of_target)>
        <<<blocks, piece_threads(hidden), 0, static_cast<cudaStream_t>(stream)>>>(in, sources, out);
    check(cudaGetLastError(), "convert_rows_kernel");
  });
}

void permute_wire(const RowMap& map, DType from, DType to, int64_t hidden, ConstRows tokens, MutableRows permuted,
                  const void* probs, int64_t prob_size, MutableRows permuted_probs, int64_t prob_lane_bytes,
                  void* stream) {
  if (map.num_tokens == 0 || map.num_rows == 0) return;
  const unsigned blocks = grid_blocks(map.num_tokens, "permute_packed");
  const ByteLanes lanes{static_cast<char*>(permuted_probs.data), permuted_probs.stride_bytes, prob_lane_bytes,
                        prob_size};
  with_formats<false>(from, to, [&](auto of_tokens, auto of_rows) {
    using From = decltype(of_tokens);
    if constexpr (!has_scales(From::kDType)) {
      permute_wire_kernel<From, decltype(of_rows)>
          <<<blocks, piece_threads(hidden), 0, static_cast<cudaStream_t>(stream)>>>(
              map.offsets, map.rows, map.experts, map.num_experts, side_of(from, hidden, tokens),
              side_of(to, hidden, permuted), static_cast<const char*>(probs), lanes);
      check(cudaGetLastError(), "permute_wire_kernel");
    }
  });
}

void sum_rows(const RowMap& map, DType from, DType to, int64_t hidden, ConstRows rows, MutableRows out, void* stream) {
  if (from == to && !has_scales(from)) return unpermute_rows(map, from, hidden, rows, nullptr, out, stream);
  if (map.num_tokens == 0 || hidden == 0) return;
  const unsigned blocks = grid_blocks(map.num_tokens, "sum_rows");
  with_formats<true>(from, to, [&](auto of_rows, auto of_out) {
    sum_wire_rows_kernel<decltype(of_rows), decltype(of_out)>
        <<<blocks, piece_threads(hidden), 0, static_cast<cudaStream_t>(stream)>>>(
            map.offsets, map.rows, side_of(from, hidden, rows), side_of(to, hidden, out));
    check(cudaGetLastError(), "sum_wire_rows_kernel");
  });
}

}  // namespace cuda
}  // namespace moe_opt
