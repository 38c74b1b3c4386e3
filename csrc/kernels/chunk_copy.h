// Copies chunks of consecutive rows to other places: the reorder between "by source rank" and "by local expert".
#pragma once

#include <cstdint>

#include "types.h"

namespace moe_opt {

// Chunk c moves rows [source_rows[c], source_rows[c] + row_counts[c]) to [target_rows[c], ...). Empty chunks are
// allowed. source and target must not overlap. One row is row_bytes wide. num_rows: the sum of row_counts.
struct ChunkList {
  int64_t num_chunks;
  const int64_t* source_rows;
  const int64_t* target_rows;
  const int64_t* row_counts;
};

namespace cpu {
// Works on the flat row range [begin, end) of all chunks laid end to end; the caller splits it over threads.
void copy_chunks(const ChunkList& chunks, int64_t row_bytes, ConstRows source, MutableRows target, int64_t num_rows,
                 int64_t begin, int64_t end);
// The same between rows of two formats: see wire_format.h.
void convert_chunks(const ChunkList& chunks, DType from, DType to, int64_t hidden, ConstRows source, MutableRows target,
                    int64_t num_rows, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
// The lists of `chunks` are device pointers.
void copy_chunks(const ChunkList& chunks, int64_t row_bytes, ConstRows source, MutableRows target, int64_t num_rows,
                 void* stream);
void convert_chunks(const ChunkList& chunks, DType from, DType to, int64_t hidden, ConstRows source, MutableRows target,
                    int64_t num_rows, void* stream);
}  // namespace cuda
}  // namespace moe_opt
