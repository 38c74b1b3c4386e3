#include "planning/hop_plan.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "planning/counts.h"

namespace moe_opt::planning {
namespace {

using Ranks = std::vector<int64_t>;

constexpr int64_t kMostRows = int64_t{1} << 32;  // that one count may say: sums of all counts stay in range

int64_t product(const std::vector<int64_t>& numbers, int64_t first, int64_t end) {
  return std::accumulate(numbers.begin() + first, numbers.begin() + end, int64_t{1}, std::multiplies<int64_t>());
}

// Who is where in a network.
class Places {
 public:
  explicit Places(const Domains& domains) : domains_(domains) {
    for (int64_t level = 0; level < domains.levels(); ++level) {
      strides_.push_back(product(domains.workers, level + 1, domains.levels()));
    }
  }

  // Of each rank, the ranks that differ from it in nothing but their domain at a level.
  Ranks across(const Ranks& ranks, int64_t level) const {
    return others(ranks, level, domains_.number(level), domains_.sizes[level] * strides_[level]);
  }

  // The ranks whose tokens reach `rank` in the hops before a level.
  Ranks sources(int64_t rank, int64_t level) const {
    Ranks ranks{rank};
    for (int64_t outer = 0; outer < level; ++outer) ranks = across(ranks, outer);
    return ranks;
  }

  // The ranks in the domains of `rank` at all levels, the offset at the outermost level fastest.
  Ranks owners(int64_t rank) const {
    Ranks ranks{rank};
    for (int64_t level = domains_.levels() - 1; level >= 0; --level) {
      ranks = others(ranks, level, domains_.sizes[level], strides_[level]);
    }
    return ranks;
  }

  // Regions of a level are counted with the innermost domain fastest.
  int64_t region(int64_t rank, int64_t level) const {
    int64_t region = 0;
    for (int64_t outer = 0; outer <= level; ++outer) {
      region = region * domains_.number(outer) + place(rank, outer) / domains_.sizes[outer];
    }
    return region;
  }

 private:
  int64_t place(int64_t rank, int64_t level) const { return rank / strides_[level] % domains_.workers[level]; }

  // For each of `ranks` those with any of `number` digits in place of its own, which is worth `step` ranks.
  Ranks others(const Ranks& ranks, int64_t level, int64_t number, int64_t step) const {
    Ranks all;
    all.reserve(ranks.size() * number);
    for (const int64_t rank : ranks) {
      const int64_t own = place(rank, level) * strides_[level] / step % number;
      for (int64_t digit = 0; digit < number; ++digit) all.push_back(rank + (digit - own) * step);
    }
    return all;
  }

  const Domains& domains_;
  std::vector<int64_t> strides_;
};

// A rank's hop at a level, and the columns of what is counted there.
struct Route {
  int64_t level, column;         // of its own region
  Ranks sources;                 // whose tokens it sends on
  std::vector<int64_t> columns;  // of the regions to which it sends them, one for each peer
  std::vector<Ranks> of_peers;   // whose tokens each peer sends on
};

std::vector<Route> routes(const Places& places, const Domains& domains, int64_t rank) {
  std::vector<Route> routes;
  int64_t first = 0;
  for (int64_t level = 0; level < domains.levels(); ++level) {
    if (domains.number(level) == 1) continue;
    Route route{level, first + places.region(rank, level), places.sources(rank, level), {}, {}};
    for (const int64_t peer : places.across({rank}, level)) {
      route.columns.push_back(first + places.region(peer, level));
      route.of_peers.push_back(places.sources(peer, level));
    }
    routes.push_back(std::move(route));
    first += domains.regions(level);
  }
  return routes;
}

// The counts of one part of the tokens on one shard of every rank.
struct PartCounts {
  const CopyCounts& counts;
  int64_t shard, part;

  int64_t operator()(int64_t rank, int64_t column) const {
    int64_t sum = 0;
    for (int64_t sample = 0; sample < counts.samples; ++sample) {
      const int64_t row = (rank * counts.etp_size + shard) * counts.samples + sample;
      sum += checked(counts.numbers[(row * counts.parts + part) * counts.columns + column], kMostRows);
    }
    return sum;
  }
  int64_t operator()(const Ranks& ranks, int64_t column) const {
    int64_t sum = 0;
    for (const int64_t rank : ranks) sum += (*this)(rank, column);
    return sum;
  }
};

}  // namespace

int64_t Domains::world() const { return product(workers, 0, levels()); }

int64_t Domains::regions(int64_t level) const { return product(workers, 0, level + 1) / product(sizes, 0, level + 1); }

int64_t num_columns(const Domains& domains, int64_t experts) {
  int64_t columns = experts;
  for (int64_t level = 0; level < domains.levels(); ++level) {
    if (domains.number(level) > 1) columns += domains.regions(level);
  }
  return columns;
}

int64_t num_held(const Domains& domains, int64_t experts) {
  return product(domains.sizes, 0, domains.levels()) * (experts / domains.world());
}

std::vector<HopPlan> plan_hops(const CopyCounts& counts, const Domains& domains, int64_t rank, int64_t etp_rank,
                               int64_t* tokens_per_expert) {
  const Places places(domains);
  const std::vector<Route> hops = routes(places, domains, rank);
  const Ranks owners = places.owners(rank), arriving = places.sources(rank, domains.levels());
  const int64_t local = counts.experts / domains.world(), held = num_held(domains, counts.experts);
  const int64_t tokens = num_columns(domains, counts.experts), first_expert = tokens - counts.experts;
  std::vector<HopPlan> plans(counts.parts);
  for (int64_t part = 0; part < counts.parts; ++part) {
    HopPlan& plan = plans[part];
    int64_t* const of_experts = tokens_per_expert + part * held;
    std::fill_n(of_experts, held, 0);
    for (int64_t shard = 0; shard < counts.etp_size; ++shard) {
      const PartCounts rows{counts, shard, part};
      int64_t arrived = hops.empty() && counts.columns > tokens ? rows(rank, tokens) : 0;
      for (const Route& route : hops) {
        HopPlan::Hop hop{route.level, {}, {}};
        for (const Ranks& sources : route.of_peers) hop.received.push_back(rows(sources, route.column));
        arrived = std::accumulate(hop.received.begin(), hop.received.end(), int64_t{0});
        if (shard != etp_rank) continue;
        for (const int64_t column : route.columns) hop.sent.push_back(rows(route.sources, column));
        plan.hops.push_back(std::move(hop));
      }
      plan.arrived.push_back(arrived);
      int64_t* of_expert = of_experts;
      for (const int64_t owner : owners) {
        for (int64_t expert = owner * local; expert < (owner + 1) * local; ++expert) {
          *of_expert++ += rows(arriving, first_expert + expert);
        }
      }
    }
    plan.gathered = std::accumulate(of_experts, of_experts + held, int64_t{0});
  }
  return plans;
}

}  // namespace moe_opt::planning
