// Who sends how many rows to whom and where they land: the arithmetic of runtime/exchange_plan.py, which stands between
// the arrival of the counts and the first message of a layer.
#pragma once

#include <cstdint>
#include <vector>

namespace moe_opt::planning {

// Rows that each rank has for each expert, and the rank that plans. Expert-parallel rank e holds the `local` experts
// from e * local on.
struct Counts {
  const int64_t* rows;  // [ep_size, etp_size, ep_size * local]
  int64_t ep_size, etp_size, local;
  int64_t ep_rank, etp_rank;
};

// Rows are cut into chunks: chunk c of n rows is [n * c / chunks, n * (c + 1) / chunks).
struct ExchangePlan {
  using Numbers = std::vector<int64_t>;
  std::vector<Numbers> sent;                   // [chunks][ep_size] rows to each expert-parallel peer
  std::vector<std::vector<Numbers>> arriving;  // [chunks][etp_size][ep_size] rows of each rank for this rank's experts
};

// Entries of each list of `plan_exchange`.
int64_t num_blocks(const Counts& counts, int64_t num_chunks);

// The plan of the rank, and the lists of a kernels/chunk_copy.h that moves what arrives into the order of experts:
// block (chunk, etp rank, ep rank, local expert) comes from source_rows on, goes to target_rows on, and has row_counts
// rows. Blocks arrive in that order, and end up in the order (local expert, etp rank, ep rank, chunk).
//
// together: all chunks are one target, and tokens_per_expert is [local]; else every chunk is a target of its own, in
// which rows count from 0, and tokens_per_expert is [chunks, local].
ExchangePlan plan_exchange(const Counts& counts, int64_t num_chunks, bool together, int64_t* source_rows,
                           int64_t* target_rows, int64_t* row_counts, int64_t* tokens_per_expert);

}  // namespace moe_opt::planning
