// Sum of parts on CUDA: a thread adds one vector of all parts in registers; every byte is read once and written once.
// A row is shared by 2^lane_bits threads, so that no thread divides to find its place.
#include "cuda_common.cuh"
#include "sum_parts.h"
#include "wire_format.cuh"

namespace moe_opt {
namespace cuda {
namespace {

// Parts that lie at equal distances, as those do that a reduce-scatter received: three runs hold these of any number of
// ranks, before this rank's own part, it, and after it.
struct Run {
  const char* data;
  int64_t step_bytes;  // from part to part
  int count;
};
struct Parts {
  Run runs[kMaxRuns];
  int num_runs;

  // What lies at an offset, in bytes, of the first part.
  __device__ __forceinline__ const char* first(int64_t offset) const { return runs[0].data + offset; }
  // Calls add() with what lies there of every other part, one after another; kAtOnce loads may be under way together.
  template <int kAtOnce, typename Add>
  __device__ __forceinline__ void for_each_other(int64_t offset, Add add) const {
#pragma unroll 1
    for (int r = 0; r < num_runs; ++r) {
      const int64_t step = runs[r].step_bytes;
      const char* part = runs[r].data + offset + (r == 0 ? step : 0);
#pragma unroll kAtOnce
      for (int left = runs[r].count - (r == 0 ? 1 : 0); left > 0; --left, part += step) add(part);
    }
  }
};

__device__ __forceinline__ int64_t row_of_thread(int lane_bits) {
  return int64_t{blockIdx.x} * (kBlockThreads >> lane_bits) + (threadIdx.x >> lane_bits);
}
__device__ __forceinline__ int lane_of_thread(int lane_bits) {
  return static_cast<int>(threadIdx.x & ((1u << lane_bits) - 1));
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kBlockThreads)
    sum_parts_kernel(const __grid_constant__ Parts parts, int64_t num_rows, int64_t vectors, char* out, int64_t stride,
                     int lane_bits) {
  using Packed = Elements<T, kCount>;
  const int64_t row = row_of_thread(lane_bits);
  if (row >= num_rows) return;
  for (int64_t vector = lane_of_thread(lane_bits); vector < vectors; vector += 1 << lane_bits) {
    const int64_t offset = row * stride + vector * int64_t{sizeof(Packed)};  // one number, as registers are few
    float total[kCount];
    Packed::load(parts.first(offset), 0).to_float(total);
    parts.for_each_other<4>(offset, [&](const char* part) {
      float term[kCount];
      Packed::load(part, 0).to_float(term);
#pragma unroll
      for (int i = 0; i < kCount; ++i) total[i] += term[i];
    });
    Packed::from_float(total).store(out + offset, 0);
  }
}

// An element of a row, moved in units to which every row is aligned.
template <typename T, typename Unit>
union InUnits {
  T value;
  Unit units[sizeof(T) / sizeof(Unit)];

  __device__ __forceinline__ static T load(const char* row, int64_t index) {
    InUnits element;
#pragma unroll
    for (int u = 0; u < static_cast<int>(sizeof(T) / sizeof(Unit)); ++u) {
      element.units[u] = reinterpret_cast<const Unit*>(row + index * sizeof(T))[u];
    }
    return element.value;
  }
  __device__ __forceinline__ static void store(T value, char* row, int64_t index) {
    InUnits element;
    element.value = value;
#pragma unroll
    for (int u = 0; u < static_cast<int>(sizeof(T) / sizeof(Unit)); ++u) {
      reinterpret_cast<Unit*>(row + index * sizeof(T))[u] = element.units[u];
    }
  }
};

// What the vectors above do not cover: doubles, and elements that lie across the ends of their packed rows.
template <typename T, typename Unit>
__global__ void __launch_bounds__(kBlockThreads)
    sum_elements_kernel(const __grid_constant__ Parts parts, int64_t num_rows, int64_t width, char* out, int64_t stride,
                        int lane_bits) {
  using Element = InUnits<T, Unit>;
  const int64_t row = row_of_thread(lane_bits);
  if (row >= num_rows) return;
  const int64_t offset = row * stride;
  for (int64_t h = lane_of_thread(lane_bits); h < width; h += 1 << lane_bits) {
    T total = Element::load(parts.first(offset), h);
    parts.for_each_other<1>(offset, [&](const char* part) { total += Element::load(part, h); });
    Element::store(total, out + offset, h);
  }
}

// Rows of 8 bits, by pieces. grid: rows.
template <typename Rows>
__global__ void __launch_bounds__(kBlockThreads) sum_wire_parts_kernel(const __grid_constant__ Parts parts, Side out) {
  const int64_t offset = blockIdx.x * out.stride;
  for (int64_t base = 0; base * kPiece < out.hidden; base += blockDim.x) {
    const int64_t piece = hidden_from_compiler(base + threadIdx.x);
    const auto load = [&](const char* row) {
      typename Rows::Packed packed{};
      if (piece * kPiece < out.hidden) packed = Rows::load(out, row, piece);
      return packed;
    };
    float total[kPiece];
#pragma unroll
    for (int i = 0; i < kPiece; ++i) total[i] = -0.0f;  // -0 + x is x, for every x
    const auto add = [&](const typename Rows::Packed& packed) {
      float values[kPiece];
      Rows::widen(packed, values);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) total[i] = __fadd_rn(total[i], values[i]);
    };
    auto held = load(parts.first(offset));
    parts.for_each_other<1>(offset, [&](const char* row) {
      const auto next = load(row);  // on its way while what is held arrives
      add(held);
      held = next;
    });
    add(held);
    __syncthreads();  // where `out` is one of the parts, others have read the scale that one of them writes
    const auto packed = Rows::narrow(total);
    Rows::store(packed, out, out.row(blockIdx.x), piece);
  }
}

// As few threads for a row of `items` as take one item each, up to a block: their number's logarithm.
int lane_bits_of(int64_t items) {
  int bits = 0;
  while (1 << bits < kBlockThreads && 1 << bits < items) ++bits;
  return bits;
}

Parts runs_of(const ConstRows* parts, int num_parts) {
  const auto step = [&](int p) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(parts[p].data) -
                                reinterpret_cast<uintptr_t>(parts[p - 1].data));
  };
  Parts all;
  all.num_runs = 0;
  for (int p = 0; p < num_parts; ++p) {
    if (all.num_runs > 0) {
      Run& last = all.runs[all.num_runs - 1];
      if (last.count == 1) last.step_bytes = step(p);
      if (step(p) == last.step_bytes) {
        ++last.count;
        continue;
      }
    }
    if (all.num_runs == kMaxRuns) {
      throw std::runtime_error("megatron_moe_opt: sum_parts adds parts in at most " + std::to_string(kMaxRuns) +
                               " runs at equal distances; these " + std::to_string(num_parts) + " have more");
    }
    all.runs[all.num_runs++] = {static_cast<const char*>(parts[p].data), 0, 1};
  }
  return all;
}

}  // namespace

void sum_parts(DType dtype, int64_t width, const ConstRows* parts, int num_parts, MutableRows out, int64_t num_rows,
               void* stream) {
  if (num_rows == 0 || width == 0) return;
  const Parts all = runs_of(parts, num_parts);
  const auto aligned = [&](int64_t bytes) {
    return rows_aligned(bytes, out) &&
           std::all_of(parts, parts + num_parts, [&](ConstRows part) { return rows_aligned(bytes, part); });
  };
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  char* target = static_cast<char*>(out.data);
  const auto sum_elements = [&](auto element, auto unit) {
    const int lane_bits = lane_bits_of(width);
    const unsigned blocks = grid_blocks(divide_up(num_rows, kBlockThreads >> lane_bits), "sum_parts");
    sum_elements_kernel<decltype(element), decltype(unit)>
        <<<blocks, kBlockThreads, 0, cuda_stream>>>(all, num_rows, width, target, out.stride_bytes, lane_bits);
    check(cudaGetLastError(), "sum_elements_kernel");
  };
  if (has_scales(dtype)) {
    const unsigned blocks = grid_blocks(num_rows, "sum_parts");
    Side side = side_of(dtype, width, out);
    side.wide = side.wide && aligned(kVectorBytes);
    const auto launch = [&](auto rows) {
      sum_wire_parts_kernel<decltype(rows)>
          <<<blocks, row_threads(divide_up(width, kPiece), 1), 0, cuda_stream>>>(all, side);
      check(cudaGetLastError(), "sum_wire_parts_kernel");
    };
    return dtype == DType::kFp8 ? launch(Fp8Rows{}) : launch(Mxfp8Rows{});
  }
  const bool whole = aligned(element_size(dtype));
  using HalfOfWord = UnitOf<2>::type;
  if (dtype == DType::kFloat64) return whole ? sum_elements(double{}, double{}) : sum_elements(double{}, HalfOfWord{});
  if (dtype == DType::kFloat32 && !whole) return sum_elements(float{}, HalfOfWord{});
  const bool wide = width * element_size(dtype) % kVectorBytes == 0 && aligned(kVectorBytes);
  with_vector(dtype, wide, [&](auto element, auto count) {
    int64_t rows = num_rows, vectors = width / count, stride = out.stride_bytes;
    if (stride == width * element_size(dtype)) {  // one behind another: a single row may have all experts' gradients
      rows *= vectors;
      vectors = 1;
      stride = count * element_size(dtype);
    }
    const int lane_bits = lane_bits_of(vectors);
    const unsigned blocks = grid_blocks(divide_up(rows, kBlockThreads >> lane_bits), "sum_parts");
    sum_parts_kernel<decltype(element), count>
        <<<blocks, kBlockThreads, 0, cuda_stream>>>(all, rows, vectors, target, stride, lane_bits);
    check(cudaGetLastError(), "sum_parts_kernel");
  });
}

}  // namespace cuda
}  // namespace moe_opt
