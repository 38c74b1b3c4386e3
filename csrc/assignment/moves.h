// The arcs of the solver's graph: what it adds to the cost to move a sample from its sink to another one, and the
// cheapest such move for every pair of sinks. Included only by transportation.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace moe_opt {
namespace assignment {

// Two levels of minima: the samples of a sink are kept in blocks, a block knows its cheapest move to every sink, and a
// pair of sinks the cheapest of all blocks. Where a sample leaves, its block is looked through again, a row of costs
// after another, and the blocks of its sink for those pairs whose cheapest move is gone.
template <typename Cost>
class Moves {
 public:
  // cost: [num_samples, num_sinks]. `none` is the cost of a move where there is no sample.
  Moves(const Cost* cost, int64_t num_samples, int64_t num_sinks, Cost none)
      : cost_(cost),
        num_sinks_(num_sinks),
        none_(none),
        slot_of_(num_samples),
        blocks_of_(num_sinks),
        free_slots_(num_sinks),
        arc_(num_sinks * num_sinks),
        gone_(num_sinks) {}

  // Forgets all samples.
  void clear() {
    for (auto& blocks : blocks_of_) blocks.clear();
    for (auto& slots : free_slots_) slots.clear();
    sample_in_.clear();
    least_.clear();
    std::fill(arc_.begin(), arc_.end(), none_);
  }

  void add(int64_t sample, int64_t sink) {
    if (free_slots_[sink].empty()) add_block(sink);
    const int32_t slot = free_slots_[sink].back();
    free_slots_[sink].pop_back();
    slot_of_[sample] = slot;
    sample_in_[slot] = static_cast<int32_t>(sample);
    take_least(sample, sink, least_.data() + slot / kBlock * num_sinks_);
    take_least(sample, sink, arc_.data() + sink * num_sinks_);
  }

  void remove(int64_t sample, int64_t sink) {
    const int32_t slot = slot_of_[sample];
    free_slots_[sink].push_back(slot);
    sample_in_[slot] = -1;
    const int64_t block = slot / kBlock;
    Cost* least = least_.data() + block * num_sinks_;
    std::copy_n(least, num_sinks_, gone_.begin());
    std::fill_n(least, num_sinks_, none_);
    for (int64_t k = block * kBlock; k < (block + 1) * kBlock; ++k) {
      if (sample_in_[k] >= 0) take_least(sample_in_[k], sink, least);
    }
    Cost* arc = arc_.data() + sink * num_sinks_;
    for (int64_t n = 0; n < num_sinks_; ++n) {
      if (gone_[n] != arc[n] || least[n] == gone_[n]) continue;
      arc[n] = none_;
      for (const int64_t b : blocks_of_[sink]) arc[n] = std::min(arc[n], least_[b * num_sinks_ + n]);
    }
  }

  // The costs of the cheapest moves to every sink, or `none`.
  const Cost* arcs(int64_t from) const { return arc_.data() + from * num_sinks_; }

  // The sample of the cheapest move. There must be one.
  int64_t cheapest(int64_t from, int64_t to) const {
    const Cost least = arcs(from)[to];
    for (const int64_t block : blocks_of_[from]) {
      if (least_[block * num_sinks_ + to] != least) continue;
      for (int64_t slot = block * kBlock;; ++slot) {
        const int64_t sample = sample_in_[slot];
        if (sample >= 0 && row(sample)[to] - row(sample)[from] == least) return sample;
      }
    }
    return -1;
  }

 private:
  static constexpr int64_t kBlock = 16;

  const Cost* row(int64_t sample) const { return cost_ + sample * num_sinks_; }

  void add_block(int64_t sink) {
    const int64_t slots = static_cast<int64_t>(sample_in_.size());
    blocks_of_[sink].push_back(slots / kBlock);
    sample_in_.resize(slots + kBlock, -1);
    least_.resize(least_.size() + num_sinks_, none_);
    for (int64_t k = kBlock; k-- > 0;) free_slots_[sink].push_back(static_cast<int32_t>(slots + k));
  }

  // least[n] = min(least[n], what moving the sample from `sink` to n adds).
  void take_least(int64_t sample, int64_t sink, Cost* least) const {
    const Cost* cost = row(sample);
    const Cost here = cost[sink];
    for (int64_t n = 0; n < num_sinks_; ++n) least[n] = std::min(least[n], cost[n] - here);
  }

  const Cost* const cost_;
  const int64_t num_sinks_;
  const Cost none_;
  std::vector<int32_t> slot_of_;                  // [samples]
  std::vector<int32_t> sample_in_;                // [blocks, kBlock]; -1 if free
  std::vector<Cost> least_;                       // [blocks, sinks]
  std::vector<std::vector<int64_t>> blocks_of_;   // of each sink
  std::vector<std::vector<int32_t>> free_slots_;  // of each sink
  std::vector<Cost> arc_;                         // [from, to]
  std::vector<Cost> gone_;                        // the minima of a block before a sample left
};

}  // namespace assignment
}  // namespace moe_opt
