// The placement solver without Python: every result is proved optimal (no move and no chain of moves makes it cheaper),
// on random, tied, degenerate and extreme costs; nodes are solved on threads side by side. Exits non-zero with one line
// for each failed expectation. tools/sanitize.sh runs it under ASan + UBSan and under TSan.
#include <algorithm>
#include <limits>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "assignment/sample_placement.h"
#include "assignment/transportation.h"
#include "expect.h"

namespace {

using moe_opt::assignment::Cluster;
using moe_opt::assignment::place;
using moe_opt::assignment::SamplePlacement;

struct Problem {
  int64_t samples, sinks;
  std::vector<int64_t> cost, capacity;
};

// The residual graph has an arc from sink a to sink b for the cheapest move between them, and one of no cost from a
// sink with room, by way of a place that stays empty, to every other. Optimal: no cycle in it is negative.
bool is_optimal(const Problem& problem, const std::vector<int64_t>& sink_of) {
  const int64_t sinks = problem.sinks;
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max() / 4;
  std::vector<int64_t> load(sinks, 0), distance(sinks * sinks, kNone);
  for (int64_t i = 0; i < problem.samples; ++i) {
    const int64_t from = sink_of[i];
    if (from < 0 || from >= sinks) return false;
    ++load[from];
    for (int64_t to = 0; to < sinks; ++to) {
      const int64_t added = problem.cost[i * sinks + to] - problem.cost[i * sinks + from];
      distance[from * sinks + to] = std::min(distance[from * sinks + to], added);
    }
  }
  for (int64_t n = 0; n < sinks; ++n) {
    if (load[n] > problem.capacity[n]) return false;
    for (int64_t to = 0; to < sinks && load[n] < problem.capacity[n]; ++to) {
      distance[n * sinks + to] = std::min<int64_t>(distance[n * sinks + to], 0);
    }
  }
  for (int64_t via = 0; via < sinks; ++via) {
    for (int64_t a = 0; a < sinks; ++a) {
      for (int64_t b = 0; b < sinks; ++b) {
        if (distance[a * sinks + via] == kNone || distance[via * sinks + b] == kNone) continue;
        const int64_t through = distance[a * sinks + via] + distance[via * sinks + b];
        distance[a * sinks + b] = std::min(distance[a * sinks + b], through);
      }
    }
  }
  for (int64_t n = 0; n < sinks; ++n) {
    if (distance[n * sinks + n] < 0) return false;
  }
  return true;
}

Problem random_problem(std::mt19937& rng, int64_t max_samples) {
  Problem problem;
  problem.samples = static_cast<int64_t>(rng() % (max_samples + 1));
  problem.sinks = 1 + static_cast<int64_t>(rng() % 10);
  const int64_t range = int64_t{1} << (rng() % 46), kind = static_cast<int64_t>(rng() % 4);
  std::uniform_int_distribution<int64_t> any(-range, range);
  std::vector<int64_t> row(problem.sinks);
  for (int64_t& cost : row) cost = any(rng);
  for (int64_t i = 0; i < problem.samples; ++i) {
    const int64_t weight = static_cast<int64_t>(rng() % 16);
    for (int64_t n = 0; n < problem.sinks; ++n) {
      // Random rows, equal rows, rows that are multiples of one, one hot sink.
      const int64_t costs[] = {any(rng), row[n], weight * (row[n] % 1000), n == 0 ? -range : any(rng)};
      problem.cost.push_back(costs[kind]);
    }
  }
  problem.capacity.assign(problem.sinks, 0);
  for (int64_t place = 0; place < problem.samples; ++place) {
    // Skewed: a sink is twice as likely as the next.
    int64_t sink = 0;
    while (rng() % 2 == 0 && sink + 1 < problem.sinks) ++sink;
    ++problem.capacity[sink];
  }
  if (rng() % 2 == 0) problem.capacity[rng() % problem.sinks] += static_cast<int64_t>(rng() % 20);
  return problem;
}

void test_random_problems() {
  std::mt19937 rng(5);
  for (int round = 0; round < 600; ++round) {
    const Problem problem = random_problem(rng, round % 20 == 0 ? 1500 : 80);
    std::vector<int64_t> sink_of(problem.samples, -1), again(sink_of), from_doubles(sink_of);
    const std::vector<double> doubles(problem.cost.begin(), problem.cost.end());
    place(problem.cost.data(), problem.samples, problem.sinks, problem.capacity.data(), sink_of.data());
    place(problem.cost.data(), problem.samples, problem.sinks, problem.capacity.data(), again.data());
    place(doubles.data(), problem.samples, problem.sinks, problem.capacity.data(), from_doubles.data());
    expect(is_optimal(problem, sink_of), "an optimal placement", "integers");
    expect(is_optimal(problem, from_doubles), "an optimal placement", "doubles");
    expect(sink_of == again, "the same placement again", "integers");
  }
}

template <typename Value>
bool refuses(const std::vector<Value>& cost, int64_t samples, int64_t sinks, const std::vector<int64_t>& capacity) {
  std::vector<int64_t> sink_of(samples);
  try {
    place(cost.data(), samples, sinks, capacity.data(), sink_of.data());
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_extremes() {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  constexpr int64_t kEdge = int64_t{1} << 62, kApart = (int64_t{1} << 56) - 1;
  Problem problem{6, 3, {}, {2, 2, 2}};
  for (const int64_t base : {-kEdge, kEdge - 1 - kApart, int64_t{0}, -kApart, kApart, int64_t{7}}) {
    for (const int64_t added : {kApart, int64_t{0}, kApart - 1}) problem.cost.push_back(base + added);
  }
  std::vector<int64_t> sink_of(6);
  place(problem.cost.data(), 6, 3, problem.capacity.data(), sink_of.data());
  expect(is_optimal(problem, sink_of), "costs at the edge of what is taken", "extremes");
  for (const std::vector<int64_t>& cost :
       {std::vector<int64_t>{kLeast, kMost}, {kMost, kLeast}, {0, kLeast}, {kMost, kMost}, {0, 2 * kApart}}) {
    expect(refuses(cost, 1, 2, {1, 1}), "costs too large or too far apart are refused", "extremes");
  }
  constexpr double kInfinity = std::numeric_limits<double>::infinity(), kLargest = std::numeric_limits<double>::max();
  for (const std::vector<double>& cost :
       {std::vector<double>{0, kInfinity}, {-kInfinity, 0}, {0, kInfinity - kInfinity}, {-kLargest, kLargest}}) {
    expect(refuses(cost, 1, 2, {1, 1}), "costs that are not finite are refused", "extremes");
  }
  expect(refuses(std::vector<int64_t>{1, 2}, 1, 2, {0, 0}), "too little capacity is refused", "extremes");
  expect(refuses(std::vector<int64_t>{1, 2}, 1, 2, {2, -1}), "a negative capacity is refused", "extremes");
  place(static_cast<const int64_t*>(nullptr), 0, 0, nullptr, nullptr);
}

// All nodes at once on threads, against one after another.
void test_two_stages() {
  std::mt19937 rng(11);
  constexpr int64_t kNodes = 4, kDevices = 12, kExperts = 24;
  for (const int64_t samples : {0, 7, 96, 1200}) {
    std::vector<int64_t> num(samples * kExperts), expert_device, device_node, capacity;
    for (int64_t& count : num) count = static_cast<int64_t>(rng() % 8 == 0 ? rng() % 500 : rng() % 3);
    for (int64_t e = 0; e < kExperts; ++e) expert_device.push_back(static_cast<int64_t>(rng() % kDevices));
    for (int64_t j = 0; j < kDevices; ++j) {
      device_node.push_back(j % kNodes);
      capacity.push_back(samples / kDevices + 1);
    }
    const Cluster cluster{kExperts, kDevices, kNodes, expert_device.data(), device_node.data(), capacity.data()};
    std::vector<int64_t> device_of(samples, -1), in_turn(samples, -1), of_doubles(samples, -1), load(kDevices, 0);
    const SamplePlacement<int64_t> placement(num.data(), samples, cluster);
    std::vector<std::thread> threads;
    for (int64_t n = 0; n < kNodes; ++n) {
      threads.emplace_back([&, n] { placement.place_on_devices(n, device_of.data()); });
    }
    for (std::thread& thread : threads) thread.join();
    const std::vector<double> doubles(num.begin(), num.end());
    const SamplePlacement<double> same(doubles.data(), samples, cluster);
    for (int64_t n = 0; n < kNodes; ++n) {
      placement.place_on_devices(n, in_turn.data());
      same.place_on_devices(n, of_doubles.data());
    }
    expect(device_of == in_turn && device_of == of_doubles, "the same placement on threads and of doubles", "stages");
    for (const int64_t device : device_of) ++load[device];
    for (const int64_t used : load) expect(used <= samples / kDevices + 1, "no device is over-full", "stages");
  }
}

}  // namespace

int main() {
  test_random_problems();
  test_extremes();
  test_two_stages();
  return exit_status("assignment");
}
