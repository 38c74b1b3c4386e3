// Lists of chunks as arguments, and their copy on whichever device.
#pragma once

#include <tuple>

#include "bindings/tensors.h"
#include "kernels/chunk_copy.h"

namespace moe_opt {

// source_rows, target_rows, row_counts and the number of rows, as ChunkList in kernels/chunk_copy.py keeps them.
using ChunkTensors = std::tuple<Input<"chunks.source_rows">, Input<"chunks.target_rows">, Input<"chunks.row_counts">,
                                Size<"chunks.num_rows">>;

ChunkList view(const ChunkTensors& tensors, const at::Device& device);

// Whether chunks, on the host, move num_rows rows in all, from among source_rows to among target_rows.
void check_chunks(const ChunkList& chunks, int64_t num_rows, int64_t source_rows, int64_t target_rows);

void run_copy_chunks(const Tensor& on, const ChunkList& chunks, int64_t row_bytes, ConstRows source, MutableRows target,
                     int64_t num_rows);

}  // namespace moe_opt
