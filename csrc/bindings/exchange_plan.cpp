#include "planning/exchange_plan.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "bindings/module.h"
#include "bindings/tensors.h"

namespace moe_opt {
namespace {

constexpr int64_t kMostChunks = 1 << 16;  // that an exchange is cut into
constexpr int64_t kMostBlocks = 1 << 22;  // of all its chunks

// `counts`, int64 [EP, ETP, E] and contiguous, as the rank at (ep_rank, etp_rank) plans by them.
planning::Counts checked_counts(const Tensor& counts, int64_t ep_rank, int64_t etp_rank) {
  check(counts.dim() == 3 && counts.scalar_type() == ScalarType::Long && counts.is_cpu(),
        "counts must be int64 [ep, etp, experts] on the CPU");
  const int64_t ep_size = counts.size(0), etp_size = counts.size(1), experts = counts.size(2);
  check(ep_size > 0 && etp_size > 0 && experts % ep_size == 0, experts, " experts do not divide among ", ep_size,
        " ranks");
  check(ep_rank < ep_size && etp_rank < etp_size, "no rank (", ep_rank, ", ", etp_rank, ") among ", ep_size, " x ",
        etp_size);
  return {counts.const_data_ptr<int64_t>(), ep_size, etp_size, experts / ep_size, ep_rank, etp_rank};
}

// (chunks, tokens_per_expert int64 [targets, local]): see planning/exchange_plan.h. counts is int64
// [EP, ETP, E]. A chunk is what runtime/rows/exchange_plan.py's ChunkPlan is made of: (sent, arriving, etp rank, the
// list that moves its blocks on `device` with the number of its rows, first row sent, received, gathered).
py::tuple plan_exchange(const Input<"counts">& of_ranks, Size<"ep_rank"> ep_rank, Size<"etp_rank"> etp_rank,
                        Size<"num_chunks"> num_chunks, Size<"targets"> targets, at::Device device) {
  const Tensor counts = of_ranks.contiguous();
  const planning::Counts of_rank = checked_counts(counts, ep_rank, etp_rank);
  check(num_chunks >= 1 && num_chunks <= kMostChunks, num_chunks, " chunks: give a number from 1 to ", kMostChunks);
  check(targets >= 1 && num_chunks % targets == 0, num_chunks, " chunks do not divide among ", targets, " targets");
  const int64_t ranks = bounded_product(of_rank.ep_size, of_rank.etp_size);
  const int64_t of_rank_blocks = std::max<int64_t>(1, of_rank.local);
  check(bounded_product(bounded_product(ranks, of_rank_blocks), num_chunks) <= kMostBlocks, num_chunks,
        " chunks of counts of shape ", counts.sizes(), " are more than ", kMostBlocks, " blocks");
  // Pinned and not waited for: a copy from pageable memory waits for all that is queued on the stream.
  const auto options = at::TensorOptions().dtype(ScalarType::Long);
  const int64_t blocks = planning::num_blocks(of_rank, num_chunks);
  Tensor lists = at::empty({3, blocks}, options.pinned_memory(device.is_cuda()));
  Tensor tokens = at::empty({targets, of_rank.local}, options);
  int64_t* list = lists.mutable_data_ptr<int64_t>();
  const std::vector<planning::ChunkPlan> plan = planning::plan_exchange(
      of_rank, num_chunks, targets, list, list + blocks, list + 2 * blocks, tokens.mutable_data_ptr<int64_t>());
  if (!device.is_cpu()) lists = lists.to(device, /*non_blocking=*/true);
  const int64_t of_chunk = blocks / num_chunks;
  py::list chunks(num_chunks.value);
  for (int64_t c = 0; c < num_chunks; ++c) {
    const planning::ChunkPlan& chunk = plan[c];
    const auto part = [&](int64_t which) { return lists.as_strided({of_chunk}, {1}, which * blocks + c * of_chunk); };
    chunks[c] = py::make_tuple(chunk.sent, chunk.arriving, etp_rank.value,
                               py::make_tuple(part(0), part(1), part(2), chunk.gathered), chunk.first_sent,
                               chunk.first_received, chunk.first_gathered);
  }
  return py::make_tuple(chunks, tokens);
}

// (int64 [partitions, EP, ETP, E] rows that each rank exchanges, [partitions * tp_size][EP] rows of each part of the
// planning rank's, the sum of counts): see planning/exchange_plan.h.
py::tuple share_out(const Input<"counts">& of_ranks, const Input<"tp_ranks">& of_tp, Size<"tp_size"> tp_size,
                    Size<"partitions"> partitions, Size<"ep_rank"> ep_rank, Size<"etp_rank"> etp_rank) {
  const Tensor counts = of_ranks.contiguous(), tp_ranks = of_tp.contiguous();
  const planning::Counts of_rank = checked_counts(counts, ep_rank, etp_rank);
  check(tp_ranks.scalar_type() == ScalarType::Long && tp_ranks.is_cpu() &&
            tp_ranks.sizes() == at::IntArrayRef{of_rank.ep_size, of_rank.etp_size},
        "tp_ranks must be int64 [ep, etp] on the CPU");
  check(tp_size >= 1 && tp_size <= kMostChunks, tp_size, " TP ranks: give a number from 1 to ", kMostChunks);
  check(partitions >= 1 && bounded_product(partitions, tp_size) <= kMostChunks, partitions, " partitions for ", tp_size,
        " TP ranks: give 1 to ", kMostChunks, " for all of them");
  check(bounded_product(counts.numel(), partitions) <= kMostBlocks, partitions, " partitions of counts of shape ",
        counts.sizes(), " are more than ", kMostBlocks, " numbers");
  Tensor sent = at::empty({partitions, of_rank.ep_size, of_rank.etp_size, counts.size(2)}, counts.options());
  const planning::Shares shares = planning::share_out(of_rank, tp_ranks.const_data_ptr<int64_t>(), tp_size, partitions,
                                                      sent.mutable_data_ptr<int64_t>());
  return py::make_tuple(sent, shares.own, shares.total);
}

}  // namespace

void bind_exchange_plan(py::module_& m) {
  define(m, "plan_exchange", plan_exchange);
  define(m, "share_out", share_out);
}

}  // namespace moe_opt
