// Sum of parts on CUDA: a thread adds one vector of all parts in registers; every byte is read once and written once.
// A row is shared by 2^lane_bits threads, so that no thread divides to find its place.
#include "cuda_common.cuh"
#include "sum_parts.h"
#include "wire_format.cuh"

namespace moe_opt {
namespace cuda {
namespace {

struct Parts {
  const char* data[kMaxParts];
  int64_t stride_bytes[kMaxParts];
};

__device__ __forceinline__ int64_t row_of_thread(int lane_bits) {
  return int64_t{blockIdx.x} * (kBlockThreads >> lane_bits) + (threadIdx.x >> lane_bits);
}
__device__ __forceinline__ int lane_of_thread(int lane_bits) {
  return static_cast<int>(threadIdx.x & ((1u << lane_bits) - 1));
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kBlockThreads)
    sum_parts_kernel(const __grid_constant__ Parts parts, int num_parts, int64_t num_rows, int64_t vectors, char* out,
                     int64_t out_stride, int lane_bits) {
  using Packed = Elements<T, kCount>;
  const int64_t row = row_of_thread(lane_bits);
  if (row >= num_rows) return;
  for (int64_t vector = lane_of_thread(lane_bits); vector < vectors; vector += 1 << lane_bits) {
    float total[kCount];
    Packed::load(parts.data[0] + row * parts.stride_bytes[0], vector).to_float(total);
#pragma unroll 4
    for (int p = 1; p < num_parts; ++p) {
      float term[kCount];
      Packed::load(parts.data[p] + row * parts.stride_bytes[p], vector).to_float(term);
#pragma unroll
      for (int i = 0; i < kCount; ++i) total[i] += term[i];
    }
    Packed::from_float(total).store(out + row * out_stride, vector);
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
    sum_elements_kernel(const __grid_constant__ Parts parts, int num_parts, int64_t num_rows, int64_t width, char* out,
                        int64_t out_stride, int lane_bits) {
  using Element = InUnits<T, Unit>;
  const int64_t row = row_of_thread(lane_bits);
  if (row >= num_rows) return;
  for (int64_t h = lane_of_thread(lane_bits); h < width; h += 1 << lane_bits) {
    T total = Element::load(parts.data[0] + row * parts.stride_bytes[0], h);
    for (int p = 1; p < num_parts; ++p) total += Element::load(parts.data[p] + row * parts.stride_bytes[p], h);
    Element::store(total, out + row * out_stride, h);
  }
}

// Rows of 8 bits, by pieces. grid: rows.
template <typename Rows>
__global__ void __launch_bounds__(kBlockThreads)
    sum_wire_parts_kernel(const __grid_constant__ Parts parts, int num_parts, Side out) {
  const auto side = [&](int p) {
    Side part = out;
    part.data = const_cast<char*>(parts.data[p]);
    part.stride = parts.stride_bytes[p];
    return part;
  };
  for (int64_t base = 0; base * kPiece < out.hidden; base += blockDim.x) {
    const int64_t piece = base + threadIdx.x;
    float total[kPiece];
    read_piece<Rows>(side(0), blockIdx.x, piece, total);
    for (int p = 1; p < num_parts; ++p) {
      float values[kPiece];
      read_piece<Rows>(side(p), blockIdx.x, piece, values);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) total[i] = __fadd_rn(total[i], values[i]);
    }
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

}  // namespace

void sum_parts(DType dtype, int64_t width, const ConstRows* parts, int num_parts, MutableRows out, int64_t num_rows,
               void* stream) {
  if (num_parts < 1 || num_parts > kMaxParts) {
    throw std::runtime_error("megatron_moe_opt: sum_parts adds 1 to " + std::to_string(kMaxParts) + " parts, not " +
                             std::to_string(num_parts));
  }
  if (num_rows == 0 || width == 0) return;
  Parts all;
  const auto aligned = [&](int64_t bytes) {
    bool every = rows_aligned(out.data, out.stride_bytes, bytes);
    for (int p = 0; p < num_parts; ++p) every = every && rows_aligned(parts[p].data, parts[p].stride_bytes, bytes);
    return every;
  };
  for (int p = 0; p < num_parts; ++p) {
    all.data[p] = static_cast<const char*>(parts[p].data);
    all.stride_bytes[p] = parts[p].stride_bytes;
  }
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  char* target = static_cast<char*>(out.data);
  const auto sum_elements = [&](auto element, auto unit) {
    const int lane_bits = lane_bits_of(width);
    const unsigned blocks = grid_blocks(divide_up(num_rows, kBlockThreads >> lane_bits), "sum_parts");
    sum_elements_kernel<decltype(element), decltype(unit)><<<blocks, kBlockThreads, 0, cuda_stream>>>(
        all, num_parts, num_rows, width, target, out.stride_bytes, lane_bits);
    check(cudaGetLastError(), "sum_elements_kernel");
  };
  if (has_scales(dtype)) {
    const unsigned blocks = grid_blocks(num_rows, "sum_parts");
    Side side = side_of(dtype, width, target, out.stride_bytes);
    side.wide = side.wide && aligned(kVectorBytes);
    const auto launch = [&](auto rows) {
      sum_wire_parts_kernel<decltype(rows)>
          <<<blocks, row_threads(divide_up(width, kPiece), 1), 0, cuda_stream>>>(all, num_parts, side);
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
    const int64_t vectors = width / count;
    const int lane_bits = lane_bits_of(vectors);
    const unsigned blocks = grid_blocks(divide_up(num_rows, kBlockThreads >> lane_bits), "sum_parts");
    sum_parts_kernel<decltype(element), count><<<blocks, kBlockThreads, 0, cuda_stream>>>(
        all, num_parts, num_rows, vectors, target, out.stride_bytes, lane_bits);
    check(cudaGetLastError(), "sum_parts_kernel");
  });
}

}  // namespace cuda
}  // namespace moe_opt
