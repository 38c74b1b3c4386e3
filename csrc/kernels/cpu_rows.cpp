// The row kernels of permute.h, chunk_copy.h and sum_parts.h for one instruction set. Compiled several times:
// MOE_OPT_ISA names the set, the compiler flags select it (see CMakeLists.txt), and -ffp-contract=off keeps product and
// sum apart, so that float32 results equal PyTorch's bit for bit.
#include "cpu_dispatch.h"
#include "cpu_vector.h"

namespace moe_opt {
namespace MOE_OPT_ISA {
namespace {

constexpr int64_t kUnroll = 4;                // vectors of a row in registers at a time
constexpr int64_t kBlock = kUnroll * kLanes;  // elements

void permute_rows(const RowMap& map, int64_t row_bytes, ConstRows tokens, MutableRows permuted, int64_t begin,
                  int64_t end, bool streaming) {
  for (int64_t t = begin; t < end; ++t) {
    const uint8_t* source = tokens.row(t);  // in the first-level cache after its first copy
    for (int64_t i = map.offsets[t]; i < map.offsets[t + 1]; ++i) {
      copy_bytes(permuted.row(map.rows[i]), source, row_bytes, streaming);
    }
  }
  if (streaming) stream_fence();
}

// out[h] = 0 + (prob_0 *) row_0[h] + (prob_1 *) row_1[h] + ...: PyTorch adds into zeros, in ascending row order.
template <typename T, bool kWeighted, bool kStreaming>
void sum_rows(T* out, int64_t hidden, ConstRows permuted, const int64_t* rows, int64_t count, const float* probs,
              const int32_t* experts) {
  int64_t h = 0;
  for (; h + kBlock <= hidden; h += kBlock) {
    Vec total[kUnroll];
    for (Vec& part : total) part = zero();
    for (int64_t k = 0; k < count; ++k) {
      const T* row = reinterpret_cast<const T*>(permuted.row(rows[k])) + h;
      [[maybe_unused]] const Vec weight = kWeighted ? broadcast(probs[experts[k]]) : zero();
      for (int64_t u = 0; u < kUnroll; ++u) {
        Vec term = load(row + u * kLanes);
        if constexpr (kWeighted) term = mul(term, weight);
        total[u] = add(total[u], term);
      }
    }
    for (int64_t u = 0; u < kUnroll; ++u) put<kStreaming>(out + h + u * kLanes, total[u]);
  }
  for (; h < hidden; ++h) {
    float total = 0.0f;
    for (int64_t k = 0; k < count; ++k) {
      float term = load_one(reinterpret_cast<const T*>(permuted.row(rows[k])) + h);
      if constexpr (kWeighted) term *= probs[experts[k]];
      total += term;
    }
    store_one(out + h, total);
  }
}

template <typename T, bool kWeighted>
void unpermute_rows_of(const RowMap& map, int64_t hidden, ConstRows permuted, const float* probs, MutableRows tokens,
                       int64_t begin, int64_t end, bool streaming) {
  for (int64_t t = begin; t < end; ++t) {
    T* out = reinterpret_cast<T*>(tokens.row(t));
    const int64_t first = map.offsets[t];
    const int64_t count = map.offsets[t + 1] - first;
    const float* token_probs = kWeighted ? probs + t * map.num_experts : nullptr;
    const int32_t* experts = kWeighted ? map.experts + first : nullptr;
    if (streaming && can_stream(out)) {
      sum_rows<T, kWeighted, true>(out, hidden, permuted, map.rows + first, count, token_probs, experts);
    } else {
      sum_rows<T, kWeighted, false>(out, hidden, permuted, map.rows + first, count, token_probs, experts);
    }
  }
  if (streaming) stream_fence();
}

// out = prob * grad; returns <grad, row>.
template <typename T, bool kStreaming>
float scale_and_dot(T* out, const T* grad, const T* row, float prob, int64_t hidden) {
  const Vec weight = broadcast(prob);
  Vec dot[kUnroll];
  for (Vec& part : dot) part = zero();
  int64_t h = 0;
  for (; h + kBlock <= hidden; h += kBlock) {
    for (int64_t u = 0; u < kUnroll; ++u) {
      const Vec g = load(grad + h + u * kLanes);
      put<kStreaming>(out + h + u * kLanes, mul(g, weight));
      dot[u] = add(dot[u], mul(g, load(row + h + u * kLanes)));
    }
  }
  float tail = 0.0f;
  for (; h < hidden; ++h) {
    const float g = load_one(grad + h);
    store_one(out + h, g * prob);
    tail += g * load_one(row + h);
  }
  return sum(add(add(dot[0], dot[1]), add(dot[2], dot[3]))) + tail;
}

template <typename T>
void unpermute_rows_backward_of(const RowMap& map, int64_t hidden, ConstRows grad_tokens, ConstRows permuted,
                                const float* probs, MutableRows grad_permuted, float* grad_probs, int64_t begin,
                                int64_t end, bool streaming) {
  for (int64_t t = begin; t < end; ++t) {
    const T* grad = reinterpret_cast<const T*>(grad_tokens.row(t));
    const float* token_probs = probs + t * map.num_experts;
    float* token_grad_probs = grad_probs + t * map.num_experts;
    for (int64_t e = 0; e < map.num_experts; ++e) token_grad_probs[e] = 0.0f;
    for (int64_t i = map.offsets[t]; i < map.offsets[t + 1]; ++i) {
      const int32_t expert = map.experts[i];
      const float prob = token_probs[expert];
      T* out = reinterpret_cast<T*>(grad_permuted.row(map.rows[i]));
      const T* row = reinterpret_cast<const T*>(permuted.row(map.rows[i]));
      token_grad_probs[expert] = streaming && can_stream(out) ? scale_and_dot<T, true>(out, grad, row, prob, hidden)
                                                              : scale_and_dot<T, false>(out, grad, row, prob, hidden);
    }
  }
  if (streaming) stream_fence();
}

void unpermute_rows(const RowMap& map, DType dtype, int64_t hidden, ConstRows permuted, const float* probs,
                    MutableRows tokens, int64_t begin, int64_t end, bool streaming) {
  const auto run = [&](auto zero_element) {
    using T = decltype(zero_element);
    if (probs != nullptr) {
      unpermute_rows_of<T, true>(map, hidden, permuted, probs, tokens, begin, end, streaming);
    } else {
      unpermute_rows_of<T, false>(map, hidden, permuted, probs, tokens, begin, end, streaming);
    }
  };
  with_element(dtype, run);
}

void unpermute_rows_backward(const RowMap& map, DType dtype, int64_t hidden, ConstRows grad_tokens, ConstRows permuted,
                             const float* probs, MutableRows grad_permuted, float* grad_probs, int64_t begin,
                             int64_t end, bool streaming) {
  const auto run = [&](auto zero_element) {
    unpermute_rows_backward_of<decltype(zero_element)>(map, hidden, grad_tokens, permuted, probs, grad_permuted,
                                                       grad_probs, begin, end, streaming);
  };
  with_element(dtype, run);
}

void copy_rows(int64_t row_bytes, ConstRows source, MutableRows target, int64_t num_rows, bool streaming) {
  if (source.stride_bytes == row_bytes && target.stride_bytes == row_bytes) {
    copy_bytes(target.row(0), source.row(0), num_rows * row_bytes, streaming);
  } else {
    for (int64_t r = 0; r < num_rows; ++r) copy_bytes(target.row(r), source.row(r), row_bytes, streaming);
  }
  if (streaming) stream_fence();
}

template <typename T>
void sum_row(T* out, const ConstRows* parts, int num_parts, int64_t row, int64_t width) {
  const auto part = [&](int p) { return reinterpret_cast<const T*>(parts[p].row(row)); };
  int64_t h = 0;
  for (; h + kBlock <= width; h += kBlock) {
    Vec total[kUnroll];
    for (int64_t u = 0; u < kUnroll; ++u) total[u] = load(part(0) + h + u * kLanes);
    for (int p = 1; p < num_parts; ++p) {
      for (int64_t u = 0; u < kUnroll; ++u) total[u] = add(total[u], load(part(p) + h + u * kLanes));
    }
    for (int64_t u = 0; u < kUnroll; ++u) store(out + h + u * kLanes, total[u]);
  }
  for (; h < width; ++h) {
    float total = load_one(part(0) + h);
    for (int p = 1; p < num_parts; ++p) total += load_one(part(p) + h);
    store_one(out + h, total);
  }
}

void sum_parts(DType dtype, int64_t width, const ConstRows* parts, int num_parts, MutableRows out, int64_t begin,
               int64_t end) {
  with_element(dtype, [&](auto zero_element) {
    for (int64_t row = begin; row < end; ++row) {
      sum_row(reinterpret_cast<decltype(zero_element)*>(out.row(row)), parts, num_parts, row, width);
    }
  });
}

#define MOE_OPT_STRING_OF(name) #name
#define MOE_OPT_STRING(name) MOE_OPT_STRING_OF(name)

}  // namespace

extern const ResidualKernels residual_kernels;  // in cpu_residuals.cpp
extern const WireKernels wire_kernels;          // in cpu_wire.cpp

extern const CpuKernels kernels;
const CpuKernels kernels = {MOE_OPT_STRING(MOE_OPT_ISA),
                            permute_rows,
                            unpermute_rows,
                            unpermute_rows_backward,
                            copy_rows,
                            sum_parts,
                            residual_kernels,
                            wire_kernels};

}  // namespace MOE_OPT_ISA
}  // namespace moe_opt
