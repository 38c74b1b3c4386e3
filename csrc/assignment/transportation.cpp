#include "transportation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "moves.h"

namespace moe_opt {
namespace assignment {
namespace {

constexpr int kGridBits = 52;  // of the integers that stand for doubles

// The costs of a sample differ by less than kRange, and so do the prices that the solver starts from. One arc leads
// from a sink with samples to any sink with room, so that no price rises above 3 kRange, and no sum of a distance, an
// arc and a price above 8 kRange: kNoArc is out of reach of these, and kNoArc + 8 kRange fits a Cost.
template <typename Cost>
struct Arithmetic;
template <>
struct Arithmetic<int32_t> {
  static constexpr int32_t kRange = int32_t{1} << 26;
  static constexpr int32_t kNoArc = int32_t{1} << 30;
};
template <>
struct Arithmetic<int64_t> {
  static constexpr int64_t kRange = int64_t{1} << 57;
  static constexpr int64_t kNoArc = int64_t{1} << 62;
};

// Successive shortest paths over the sinks, started from the prices of a coarser problem.
//
// Every sink has a price, and every sample sits where cost + price is least. Samples are pushed out of over-full sinks
// along the cheapest paths of moves, the prices follow (potentials of Dijkstra's algorithm), and with the last
// over-full sink the placement is optimal: no move and no cycle of moves can make it cheaper. Any prices are a valid
// start; good ones leave little to push.
template <typename Cost, int64_t kSinks>
class Solver {
 public:
  // cost: [num_samples, num_sinks]; the costs of a sample differ by less than kRange.
  Solver(const Cost* cost, int64_t num_samples, int64_t num_sinks)
      : cost_(cost),
        num_samples_(num_samples),
        sinks_(num_sinks),
        sink_of_(num_samples),
        load_(num_sinks),
        price_(num_sinks, 0),
        moves_(cost, num_samples, num_sinks, kNoArc),
        distance_(num_sinks),
        closed_(num_sinks) {}

  // capacity must hold all samples.
  const std::vector<int32_t>& solve(const std::vector<int64_t>& capacity) {
    solve(capacity, 1);
    return sink_of_;
  }

 private:
  static constexpr Cost kRange = Arithmetic<Cost>::kRange;
  static constexpr Cost kNoArc = Arithmetic<Cost>::kNoArc;
  static constexpr int64_t kCoarsening = 4;
  static constexpr int64_t kLeastSamplesPerSink = 12;  // below that a coarser problem costs more than it saves

  int64_t sinks() const { return kSinks > 0 ? kSinks : sinks_; }

  // Places the samples 0, step, 2 step, ...
  void solve(const std::vector<int64_t>& capacity, int64_t step) {
    const int64_t samples = (num_samples_ + step - 1) / step;
    const int64_t room = std::accumulate(capacity.begin(), capacity.end(), int64_t{0});
    // Where places stay empty, they must do so at the least price, and prices must start equal to see to that.
    if (samples == room && samples > kLeastSamplesPerSink * sinks()) {
      const int64_t fewer = (samples + kCoarsening - 1) / kCoarsening;
      std::vector<int64_t> scaled(sinks());
      int64_t before = 0;
      for (int64_t n = 0; n < sinks(); ++n) {
        const int64_t end = before + capacity[n];
        scaled[n] = end * fewer / samples - before * fewer / samples;
        before = end;
      }
      solve(scaled, step * kCoarsening);
      const Cost least = *std::min_element(price_.begin(), price_.end());
      for (Cost& price : price_) price = std::min<Cost>(price - least, kRange);
    }
    place_at_least_price(capacity, step);
    while (find_path(capacity)) push(capacity);
  }

  void place_at_least_price(const std::vector<int64_t>& capacity, int64_t step) {
    std::fill(load_.begin(), load_.end(), 0);
    moves_.clear();
    for (int64_t i = 0; i < num_samples_; i += step) {
      const Cost* cost = cost_ + i * sinks();
      Cost least = cost[0] + price_[0];
      for (int64_t n = 1; n < sinks(); ++n) least = std::min(least, cost[n] + price_[n]);
      // Among equals the first with room, else the first. Without branches, which nobody could predict.
      int64_t choice = 2 * sinks();
      for (int64_t n = 0; n < sinks(); ++n) {
        const int64_t rank = load_[n] < capacity[n] ? n : n + sinks();
        choice = std::min(choice, cost[n] + price_[n] == least ? rank : choice);
      }
      const int64_t sink = choice < sinks() ? choice : choice - sinks();
      ++load_[sink];
      sink_of_[i] = static_cast<int32_t>(sink);
      moves_.add(i, sink);
    }
  }

  // Dijkstra's algorithm from all over-full sinks to the nearest sink with room. False if no sink is over-full.
  bool find_path(const std::vector<int64_t>& capacity) {
    bool overfull = false;
    for (int64_t n = 0; n < sinks(); ++n) {
      const bool source = load_[n] > capacity[n];
      overfull |= source;
      distance_[n] = source ? 0 : kNoArc;
      closed_[n] = 0;
    }
    if (!overfull) return false;
    order_.clear();
    int64_t nearest;
    for (;;) {
      nearest = nearest_open();
      if (load_[nearest] < capacity[nearest]) break;
      closed_[nearest] = 1;
      order_.push_back(nearest);
      const Cost* arc = moves_.arcs(nearest);
      const Cost from = distance_[nearest] - price_[nearest];
      for (int64_t n = 0; n < sinks(); ++n) distance_[n] = std::min(distance_[n], from + arc[n] + price_[n]);
    }
    path_.assign(1, nearest);
    for (size_t earlier = order_.size();
         distance_[path_.back()] > 0 || load_[path_.back()] <= capacity[path_.back()];) {
      earlier = closer_on_path(path_.back(), earlier);
      path_.push_back(order_[earlier]);
    }
    for (int64_t n = 0; n < sinks(); ++n) price_[n] += std::max<Cost>(0, distance_[nearest] - distance_[n]);
    return true;
  }

  int64_t nearest_open() const {
    int64_t nearest = -1;
    Cost least = std::numeric_limits<Cost>::max();
    for (int64_t n = 0; n < sinks(); ++n) {  // no branches in here either
      const Cost distance = closed_[n] ? std::numeric_limits<Cost>::max() : distance_[n];
      nearest = distance < least ? n : nearest;
      least = std::min(least, distance);
    }
    return nearest;
  }

  // Where in order_ the sink is, closed before order_[end], through which the shortest path to `sink` comes.
  size_t closer_on_path(int64_t sink, size_t end) const {
    for (size_t k = 0; k < end; ++k) {
      const int64_t from = order_[k];
      if (distance_[from] - price_[from] + moves_.arcs(from)[sink] + price_[sink] == distance_[sink]) return k;
    }
    return end;  // cannot happen: some sink has set the distance
  }

  // Moves one sample along each arc of the path, again and again while the path remains a shortest one.
  void push(const std::vector<int64_t>& capacity) {
    const int64_t target = path_.front(), source = path_.back();
    bool again = true;
    while (again) {
      for (size_t k = 0; k + 1 < path_.size(); ++k) move_cheapest(path_[k + 1], path_[k]);
      again = --load_[source] > capacity[source];
      again &= ++load_[target] < capacity[target];
      for (size_t k = 0; again && k + 1 < path_.size(); ++k) {
        again = moves_.arcs(path_[k + 1])[path_[k]] + price_[path_[k]] == price_[path_[k + 1]];
      }
    }
  }

  void move_cheapest(int64_t from, int64_t to) {
    const int64_t sample = moves_.cheapest(from, to);
    moves_.remove(sample, from);
    moves_.add(sample, to);
    sink_of_[sample] = static_cast<int32_t>(to);
  }

  const Cost* const cost_;
  const int64_t num_samples_, sinks_;
  std::vector<int32_t> sink_of_;
  std::vector<int64_t> load_;  // samples on each sink
  std::vector<Cost> price_;
  Moves<Cost, kSinks> moves_;  // the arcs of the graph
  // The last search.
  std::vector<Cost> distance_;
  std::vector<char> closed_;
  std::vector<int64_t> order_;  // of closing
  std::vector<int64_t> path_;   // from the sink with room back to the over-full one
};

// Two sinks are a selection: those that lose least by going to sink 1 go there.
template <typename Cost>
std::vector<int32_t> place_on_two(const Cost* cost, int64_t num_samples, const std::vector<int64_t>& capacity) {
  std::vector<std::pair<Cost, int32_t>> moves(num_samples);  // from sink 0 to sink 1; samples decide among equals
  int64_t gains = 0;
  for (int64_t i = 0; i < num_samples; ++i) {
    moves[i] = {cost[2 * i + 1] - cost[2 * i], static_cast<int32_t>(i)};
    gains += moves[i].first < 0;
  }
  const int64_t count = std::min(std::max(gains, num_samples - capacity[0]), capacity[1]);
  std::nth_element(moves.begin(), moves.begin() + count, moves.end());
  std::vector<int32_t> sink_of(num_samples, 0);
  for (int64_t k = 0; k < count; ++k) sink_of[moves[k].second] = 1;
  return sink_of;
}

template <typename Cost>
void place_differences(const Cost* cost, int64_t num_samples, int64_t num_sinks, const std::vector<int64_t>& capacity,
                       int64_t* sink_of) {
  const auto search = [&](auto known) {
    return Solver<Cost, decltype(known)::value>(cost, num_samples, num_sinks).solve(capacity);
  };
  std::vector<int32_t> placed;
  switch (num_sinks) {  // the usual numbers of nodes, and of devices a node
    case 2:
      placed = place_on_two(cost, num_samples, capacity);
      break;
    case 4:
      placed = search(std::integral_constant<int64_t, 4>{});
      break;
    case 8:
      placed = search(std::integral_constant<int64_t, 8>{});
      break;
    default:
      placed = search(std::integral_constant<int64_t, 0>{});
  }
  std::copy(placed.begin(), placed.end(), sink_of);
}

// Costs as differences from the first of their row, or null where one of them is not inside (-kRange, kRange) / 2.
template <typename Cost>
std::unique_ptr<Cost[]> differences(const int64_t* cost, int64_t num_samples, int64_t num_sinks) {
  constexpr uint64_t kHalfRange = Arithmetic<Cost>::kRange / 2, kNoOverflow = uint64_t{1} << 62;
  std::unique_ptr<Cost[]> all(new Cost[num_samples * num_sinks]);
  uint64_t distances = 0, sizes = 0;  // bits of unsigned numbers that are small where all is well
  for (int64_t i = 0; i < num_samples; ++i) {
    const int64_t* row = cost + i * num_sinks;
    for (int64_t n = 0; n < num_sinks; ++n) {
      const uint64_t difference = static_cast<uint64_t>(row[n]) - static_cast<uint64_t>(row[0]);
      distances |= difference + kHalfRange;
      sizes |= static_cast<uint64_t>(row[n]) + kNoOverflow;
      all[i * num_sinks + n] = static_cast<Cost>(difference);
    }
  }
  const bool near = distances < 2 * kHalfRange && sizes < 2 * kNoOverflow;
  return near ? std::move(all) : nullptr;
}

void refuse(const std::string& why) { throw std::invalid_argument(why); }

}  // namespace

std::vector<int64_t> usable_capacity(const int64_t* capacity, int64_t num_samples, int64_t num_sinks) {
  if (num_samples > INT32_MAX || num_sinks > INT32_MAX) refuse("more than 2^31 - 1 samples or sinks");
  std::vector<int64_t> usable(num_sinks);
  int64_t room = 0;
  for (int64_t n = 0; n < num_sinks; ++n) {
    if (capacity[n] < 0) refuse("capacity[" + std::to_string(n) + "] is negative: " + std::to_string(capacity[n]));
    usable[n] = std::min(capacity[n], num_samples);
    room += usable[n];
  }
  if (room < num_samples) {
    refuse("the capacities sum to " + std::to_string(room) + ", too few for " + std::to_string(num_samples) +
           " samples");
  }
  return usable;
}

void place(const int64_t* cost, int64_t num_samples, int64_t num_sinks, const int64_t* capacity, int64_t* sink_of) {
  const std::vector<int64_t> usable = usable_capacity(capacity, num_samples, num_sinks);
  if (num_samples == 0) return;
  if (const auto narrow = differences<int32_t>(cost, num_samples, num_sinks)) {
    place_differences(narrow.get(), num_samples, num_sinks, usable, sink_of);
  } else if (const auto wide = differences<int64_t>(cost, num_samples, num_sinks)) {
    place_differences(wide.get(), num_samples, num_sinks, usable, sink_of);
  } else {
    refuse("costs must lie within 2^62 of zero, and those of one sample within 2^56 of each other");
  }
}

void place(const double* cost, int64_t num_samples, int64_t num_sinks, const int64_t* capacity, int64_t* sink_of) {
  const std::vector<int64_t> usable = usable_capacity(capacity, num_samples, num_sinks);
  if (num_samples == 0) return;
  double range = 0;
  for (int64_t k = 0; k < num_samples * num_sinks; ++k) {
    if (!std::isfinite(cost[k])) {
      refuse("cost[" + std::to_string(k / num_sinks) + ", " + std::to_string(k % num_sinks) + "] is not finite");
    }
    range = std::max(range, std::abs(cost[k] - cost[k / num_sinks * num_sinks]));
  }
  if (!std::isfinite(range)) refuse("the costs of one sample differ by more than a float64 holds");
  int exponent = 0;  // range < 2^exponent
  std::frexp(range, &exponent);
  const int shift = kGridBits - exponent;
  // In two steps: 2^shift may be too large for a double.
  const double half_scale = std::ldexp(1.0, shift / 2), scale = std::ldexp(1.0, shift - shift / 2);
  const std::unique_ptr<int64_t[]> rounded(new int64_t[num_samples * num_sinks]);
  for (int64_t k = 0; k < num_samples * num_sinks; ++k) {
    rounded[k] = std::llrint((cost[k] - cost[k / num_sinks * num_sinks]) * half_scale * scale);
  }
  place(rounded.get(), num_samples, num_sinks, capacity, sink_of);
}

}  // namespace assignment
}  // namespace moe_opt
