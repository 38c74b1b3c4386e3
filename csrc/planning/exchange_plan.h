// Who sends how many rows to whom and where they land: the arithmetic of runtime/rows/exchange_plan.py, which stands
// between the arrival of the counts and the first message of a layer.
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

// One of the chunks that rows are cut into: chunk c of n rows is [n * c / chunks, n * (c + 1) / chunks).
struct ChunkPlan {
  using Numbers = std::vector<int64_t>;
  std::vector<int64_t> sent;      // [ep_size] rows to each expert-parallel peer
  std::vector<Numbers> arriving;  // [etp_size][ep_size] rows of each rank for this rank's experts
  int64_t gathered = 0;           // all that arrive
  // Where its rows begin among those of its target that this rank sends, receives from its own expert-tensor-parallel
  // rank, and gathers.
  int64_t first_sent = 0, first_received = 0, first_gathered = 0;
};

// Entries of each list of `plan_exchange`.
int64_t num_blocks(const Counts& counts, int64_t num_chunks);

// The plan of the rank, and the lists of a kernels/chunk_copy.h that moves what arrives into the order of experts:
// block (chunk, etp rank, ep rank, local expert) comes from source_rows on, goes to target_rows on, and has row_counts
// rows. Blocks arrive in that order, and end up in the order (local expert, etp rank, ep rank, chunk).
//
// targets: as many chunks, one behind another, make up each, in which rows count from 0; divides num_chunks.
// tokens_per_expert is [targets, local].
//
// Throws std::invalid_argument where it meets what is no number of rows.
std::vector<ChunkPlan> plan_exchange(const Counts& counts, int64_t num_chunks, int64_t targets, int64_t* source_rows,
                                     int64_t* target_rows, int64_t* row_counts, int64_t* tokens_per_expert);

// Where the ranks of a TP group of `tp_size` have the same rows: of every partition, TP rank m exchanges part m.
struct Shares {
  // [partitions * tp_size][ep_size] rows of each part of the planning rank's for each peer
  std::vector<ChunkPlan::Numbers> own;
  int64_t total = 0;  // rows of all ranks before they are cut, which all agree on
};

// What each rank exchanges, into sent [partitions, ep_size, etp_size, ep_size * local]: the parts are chunks, of which
// each partition has tp_size, one behind another. tp_ranks [ep_size, etp_size] is the TP rank of each.
//
// Throws std::invalid_argument where it meets what is no number of rows, or no TP rank.
Shares share_out(const Counts& counts, const int64_t* tp_ranks, int64_t tp_size, int64_t partitions, int64_t* sent);

}  // namespace moe_opt::planning
