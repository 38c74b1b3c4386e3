// Where tokens go hop by hop: the arithmetic of runtime/hops/hop_plan.py, which stands between the arrival of the
// counts and the first message of a layer whose tokens hop.
#pragma once

#include <cstdint>
#include <vector>

namespace moe_opt::planning {

// The ranks of an expert-parallel group on the levels of its network, outermost first, and in the expert domains of
// each level: topology/domains.py.
struct Domains {
  std::vector<int64_t> workers;  // of each level, in one worker of the level outside it
  std::vector<int64_t> sizes;    // of a domain of each level; they divide the workers

  int64_t levels() const { return static_cast<int64_t>(workers.size()); }
  int64_t world() const;
  // In one worker of the level outside: the ranks of an all-to-all group. Tokens hop where there are several.
  int64_t number(int64_t level) const { return workers[level] / sizes[level]; }
  // The different regions that the ranks are in at a level: what the domains of levels 0 .. level have in common.
  int64_t regions(int64_t level) const;
};

// Tokens' copies, as runtime/hops/hop_way.py counts them. [ranks, etp_size, samples, parts, columns], of each rank's
// part of each of its samples (or of all its tokens as one): a column for each region of each level at which tokens
// hop, then its rows for each expert and, where there is one column more, its tokens.
struct CopyCounts {
  const int64_t* numbers;
  int64_t etp_size, samples, parts, columns, experts;
};

int64_t num_columns(const Domains& domains, int64_t experts);  // without that of tokens
int64_t num_held(const Domains& domains, int64_t experts);     // experts that a rank holds, those of its domains

// One rank's part in the hops of one part of the tokens of all ranks.
struct HopPlan {
  struct Hop {
    int64_t level;
    std::vector<int64_t> sent, received;  // rows to and from each rank of the level's all-to-all group
  };
  std::vector<Hop> hops;         // at each level with several domains, outermost first
  std::vector<int64_t> arrived;  // [etp_size] rows that have come to each rank of expert-TP in the end
  int64_t gathered = 0;          // rows of the experts held here
};

// The plans of all parts; tokens_per_expert is [parts, num_held], by owner, whose offset at the outermost level changes
// fastest, and expert of the owner. Throws std::invalid_argument where it meets what is no number of rows.
std::vector<HopPlan> plan_hops(const CopyCounts& counts, const Domains& domains, int64_t rank, int64_t etp_rank,
                               int64_t* tokens_per_expert);

}  // namespace moe_opt::planning
