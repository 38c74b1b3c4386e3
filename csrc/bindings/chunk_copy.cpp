#include "bindings/chunk_copy.h"

#include "bindings/module.h"

namespace moe_opt {

ChunkList view(const ChunkTensors& tensors, const at::Device& device) {
  const auto& [sources, targets, counts, num_rows] = tensors;
  check_index(sources, device);
  check_index(targets, device);
  check_index(counts, device);
  check(sources.numel() == counts.numel() && targets.numel() == counts.numel(),
        "chunks: source_rows, target_rows and row_counts differ in length");
  return {counts.numel(), sources.const_data_ptr<int64_t>(), targets.const_data_ptr<int64_t>(),
          counts.const_data_ptr<int64_t>()};
}

void check_chunks(const ChunkList& chunks, int64_t num_rows, int64_t source_rows, int64_t target_rows) {
  int64_t total = 0;
  for (int64_t c = 0; c < chunks.num_chunks; ++c) {
    const int64_t count = chunks.row_counts[c], source = chunks.source_rows[c], target = chunks.target_rows[c];
    const bool inside = count >= 0 && count <= num_rows - total && count <= source_rows && source >= 0 &&
                        source <= source_rows - count && target >= 0 && target <= target_rows - count;
    check(inside, "chunk ", c, " (", count, " rows from ", source, " to ", target, ") is outside [0, ", source_rows,
          ") or [0, ", target_rows, "), or beyond ", num_rows, " rows in all");
    total += count;
  }
  check(total == num_rows, "the chunks have ", total, " rows together, not ", num_rows);
}

void run_copy_chunks(const Tensor& on, const ChunkList& chunks, int64_t row_bytes, ConstRows source, MutableRows target,
                     int64_t num_rows) {
  MOE_OPT_IF_CUDA(on, cuda::copy_chunks(chunks, row_bytes, source, target, num_rows, call.stream)) {
    for_row_ranges(num_rows, row_bytes, [&](int64_t begin, int64_t end) {
      cpu::copy_chunks(chunks, row_bytes, source, target, num_rows, begin, end);
    });
  }
}

namespace {

Tensor copy_chunks(const Input<"rows">& rows, const ChunkTensors& chunk_tensors) {
  check_tensor(rows, 2, rows.device());
  const int64_t num_rows = std::get<3>(chunk_tensors);
  check(rows.size(0) == num_rows, "the rows of shape ", rows.sizes(), " do not fit chunks of ", num_rows, " rows");
  const ChunkList chunks = view(chunk_tensors, rows.device());
  if (rows.is_cpu()) check_chunks(chunks, num_rows, num_rows, num_rows);
  Tensor out = empty_like(rows.sizes(), rows.scalar_type(), rows);
  run_copy_chunks(rows, chunks, const_rows(rows).stride_bytes, const_rows(rows), mutable_rows(out), num_rows);
  return out;
}

}  // namespace

void bind_chunk_copy(py::module_& m) { define(m, "copy_chunks", copy_chunks, NoGil()); }

}  // namespace moe_opt
