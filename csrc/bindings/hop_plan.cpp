#include "planning/hop_plan.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "bindings/module.h"
#include "bindings/tensors.h"

namespace moe_opt {
namespace {

constexpr int64_t kMostCounts = 1 << 30;  // sums of all of them stay in range

planning::Domains checked_domains(const std::vector<Size<"workers">>& workers,
                                  const std::vector<Size<"domain_sizes">>& sizes, int64_t ranks) {
  check(!workers.empty() && workers.size() == sizes.size(), sizes.size(), " domain sizes do not fit ", workers.size(),
        " levels");
  int64_t world = 1;
  for (size_t level = 0; level < workers.size(); ++level) {
    check(sizes[level] >= 1 && workers[level] >= 1 && workers[level] % sizes[level] == 0, "domain size ", sizes[level],
          " does not divide ", workers[level], " workers");
    world = bounded_product(world, workers[level]);
  }
  check(world == ranks, "levels of ", world, " workers do not fit counts of ", ranks, " ranks");
  return {{workers.begin(), workers.end()}, {sizes.begin(), sizes.end()}};
}

// For each part of the tokens (hops, tokens_per_expert int64 [held], rows of the experts held, rows that arrive at each
// rank of expert-TP), a hop being (level, sent, received): see planning/hop_plan.h. counts is int64
// [ranks, ETP, samples, parts, columns].
py::list plan_hops(const Input<"counts">& of_ranks, const std::vector<Size<"workers">>& workers,
                   const std::vector<Size<"domain_sizes">>& sizes, Size<"num_experts"> experts, Size<"rank"> rank,
                   Size<"etp_rank"> etp_rank) {
  check(of_ranks.dim() == 5 && of_ranks.scalar_type() == ScalarType::Long && of_ranks.is_cpu(),
        "counts must be int64 [ranks, etp, samples, parts, columns] on the CPU");
  check(of_ranks.numel() > 0 && of_ranks.numel() <= kMostCounts, "counts of shape ", of_ranks.sizes(),
        " are none, or more than ", kMostCounts);
  const planning::Domains domains = checked_domains(workers, sizes, of_ranks.size(0));
  check(rank < of_ranks.size(0) && etp_rank < of_ranks.size(1), "no rank (", rank, ", ", etp_rank, ") among ",
        of_ranks.size(0), " x ", of_ranks.size(1));
  const int64_t columns = of_ranks.size(4);
  check(experts > 0 && experts <= columns && experts % of_ranks.size(0) == 0, experts, " experts do not divide among ",
        of_ranks.size(0), " ranks, or have no column of their own");
  const int64_t asked = planning::num_columns(domains, experts);
  check(columns == asked || columns == asked + 1, "counts must have ", asked, " columns, or that of tokens more");

  const Tensor counts = of_ranks.contiguous();
  const planning::CopyCounts copies{
      counts.const_data_ptr<int64_t>(), counts.size(1), counts.size(2), counts.size(3), columns, experts};
  const int64_t held = planning::num_held(domains, experts);
  Tensor tokens = at::empty({copies.parts, held}, at::TensorOptions().dtype(ScalarType::Long));
  const std::vector<planning::HopPlan> plan =
      planning::plan_hops(copies, domains, rank, etp_rank, tokens.mutable_data_ptr<int64_t>());
  py::list parts(plan.size());
  for (size_t part = 0; part < plan.size(); ++part) {
    py::list hops;
    for (const planning::HopPlan::Hop& hop : plan[part].hops)
      hops.append(py::make_tuple(hop.level, hop.sent, hop.received));
    parts[part] = py::make_tuple(hops, tokens.as_strided({held}, {1}, static_cast<int64_t>(part) * held),
                                 plan[part].gathered, plan[part].arrived);
  }
  return parts;
}

}  // namespace

void bind_hop_plan(py::module_& m) { define(m, "plan_hops", plan_hops); }

}  // namespace moe_opt
