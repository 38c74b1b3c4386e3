// Exact placement of samples on sinks (nodes or devices): every sample goes to one sink, sink n takes at most
// capacity[n] samples, and the sum of the costs is the least possible. A transportation problem.
//
// The textbook's way copies every sink capacity[n] times and matches samples with copies (Kuhn-Munkres, O(I^3)). Here a
// sink stays one vertex, so that the graph has N vertices however many samples there are. Plain C++, no framework.
#pragma once

#include <cstdint>
#include <vector>

namespace moe_opt {
namespace assignment {

// sink_of[i] = the sink of sample i. cost: [num_samples, num_sinks], row-major; only differences inside a row matter.
// Deterministic: equal input gives equal output. May run on any thread.
//
// Integers are exact; they must lie within 2^62 of zero, and those of one sample within 2^56 of each other. Doubles are
// rounded to a grid of 2^-52 of the largest difference inside a row first, and solved exactly on that: exact where the
// grid holds the costs (as for integers below 2^51), else within num_samples * 2^-51 of that difference from the
// optimum.
//
// Throws std::invalid_argument: no room for all samples, a negative capacity, costs that are not finite or too far
// apart.
void place(const int64_t* cost, int64_t num_samples, int64_t num_sinks, const int64_t* capacity, int64_t* sink_of);
void place(const double* cost, int64_t num_samples, int64_t num_sinks, const int64_t* capacity, int64_t* sink_of);

// The capacities, none above the number of samples. Throws as `place` does where they are negative or too small.
std::vector<int64_t> usable_capacity(const int64_t* capacity, int64_t num_samples, int64_t num_sinks);

}  // namespace assignment
}  // namespace moe_opt
