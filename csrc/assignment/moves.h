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
//
// kSinks is the number of sinks where the compiler is to know it, else 0: rows of 4 or 8 costs are too short for loops
// of any length.
template <typename Cost, int64_t kSinks>
class Moves {
 public:
  // cost: [num_samples, num_sinks]. `none` is the cost of a move where there is no sample.
  Moves(const Cost* cost, int64_t num_samples, int64_t num_sinks, Cost none)
      : cost_(cost),
        sinks_(num_sinks),
        none_(none),
        slot_of_(num_samples),
        blocks_of_(num_sinks),
        arc_(num_sinks * num_sinks),
        now_(num_sinks) {
    const int64_t blocks = num_samples / kBlock + num_sinks;  // more where many samples come and go
    sample_in_.reserve(blocks * kBlock);
    least_.reserve(blocks * num_sinks);
    blocks_.reserve(blocks);
  }

  // Forgets all samples.
  void clear() {
    std::fill(blocks_of_.begin(), blocks_of_.end(), BlocksOfSink{});
    blocks_.clear();
    sample_in_.clear();
    least_.clear();
    std::fill(arc_.begin(), arc_.end(), none_);
  }

  // Not inlined: inside the callers' loops compilers made it a fifth slower.
  [[gnu::noinline]] void add(int64_t sample, int64_t sink) {
    const int64_t b = block_with_room(sink);
    Block& block = blocks_[b];
    const int64_t slot = b * kBlock + block.size++;
    if (block.size == kBlock) blocks_of_[sink].with_room = block.next_with_room;
    slot_of_[sample] = static_cast<int32_t>(slot);
    sample_in_[slot] = static_cast<int32_t>(sample);
    take_least(sample, sink, least_.data() + b * sinks());
    take_least(sample, sink, arc_.data() + sink * sinks());
  }

  void remove(int64_t sample, int64_t sink) {
    const int64_t slot = slot_of_[sample], b = slot / kBlock;
    Block& block = blocks_[b];
    if (block.size-- == kBlock) {
      block.next_with_room = blocks_of_[sink].with_room;
      blocks_of_[sink].with_room = static_cast<int32_t>(b);
    }
    const int32_t last = sample_in_[b * kBlock + block.size];
    sample_in_[slot] = last;
    slot_of_[last] = static_cast<int32_t>(slot);

    Cost known[kSinks > 0 ? kSinks : 1];  // stays in registers, where sums in memory would wait for each other
    Cost* const now = kSinks > 0 ? known : now_.data();
    std::fill_n(now, sinks(), none_);
    for (int64_t k = b * kBlock; k < b * kBlock + block.size; ++k) take_least(sample_in_[k], sink, now);
    update_arcs(sink, least_.data() + b * sinks(), now);
  }

  // The costs of the cheapest moves to every sink, or `none`.
  const Cost* arcs(int64_t from) const { return arc_.data() + from * sinks(); }

  // The sample of the cheapest move. There must be one.
  int64_t cheapest(int64_t from, int64_t to) const {
    const Cost least = arcs(from)[to];
    int64_t b = blocks_of_[from].first;
    while (least_[b * sinks() + to] != least) b = blocks_[b].next;
    for (int64_t slot = b * kBlock;; ++slot) {
      const int64_t sample = sample_in_[slot];
      if (row(sample)[to] - row(sample)[from] == least) return sample;
    }
  }

 private:
  static constexpr int64_t kBlock = 16;
  static constexpr int64_t kFewBlocks = 4;

  struct Block {
    int32_t size = 0;   // samples in it, in its first slots
    int32_t next = -1;  // of the same sink
    int32_t next_with_room = -1;
  };
  struct BlocksOfSink {
    int32_t count = 0;
    int32_t first = -1;
    int32_t with_room = -1;
  };

  int64_t sinks() const { return kSinks > 0 ? kSinks : sinks_; }
  const Cost* row(int64_t sample) const { return cost_ + sample * sinks(); }

  int64_t block_with_room(int64_t sink) {
    BlocksOfSink& of_sink = blocks_of_[sink];
    if (of_sink.with_room < 0) {
      const auto added = static_cast<int32_t>(blocks_.size());
      blocks_.push_back({0, of_sink.first, -1});
      sample_in_.resize(sample_in_.size() + kBlock);
      least_.resize(least_.size() + sinks(), none_);
      of_sink = {of_sink.count + 1, added, added};
    }
    return of_sink.with_room;
  }

  // least[n] = min(least[n], what moving the sample from `sink` to n adds).
  void take_least(int64_t sample, int64_t sink, Cost* least) const {
    const Cost* cost = row(sample);
    const Cost here = cost[sink];
    for (int64_t n = 0; n < sinks(); ++n) least[n] = std::min(least[n], cost[n] - here);
  }

  // The least moves of a block of `sink` have risen from `least` to `now`.
  void update_arcs(int64_t sink, Cost* least, const Cost* now) {
    Cost* arc = arc_.data() + sink * sinks();
    if (blocks_of_[sink].count > kFewBlocks) {
      for (int64_t n = 0; n < sinks(); ++n) {
        const Cost before = least[n];
        least[n] = now[n];
        if (before != arc[n] || now[n] == before) continue;
        arc[n] = none_;
        for (int64_t b = blocks_of_[sink].first; b >= 0; b = blocks_[b].next) {
          arc[n] = std::min(arc[n], least_[b * sinks() + n]);
        }
      }
      return;
    }
    // All pairs, without branches that nobody could predict.
    std::copy_n(now, sinks(), least);
    Cost known[kSinks > 0 ? kSinks : 1];
    Cost* const sum = kSinks > 0 ? known : arc;
    std::fill_n(sum, sinks(), none_);
    for (int64_t b = blocks_of_[sink].first; b >= 0; b = blocks_[b].next) {
      const Cost* of_block = least_.data() + b * sinks();
      for (int64_t n = 0; n < sinks(); ++n) sum[n] = std::min(sum[n], of_block[n]);
    }
    if (kSinks > 0) std::copy_n(sum, sinks(), arc);
  }

  const Cost* const cost_;
  const int64_t sinks_;
  const Cost none_;
  std::vector<int32_t> slot_of_;    // [samples]
  std::vector<int32_t> sample_in_;  // [blocks, kBlock]
  std::vector<Cost> least_;         // [blocks, sinks]
  std::vector<Block> blocks_;
  std::vector<BlocksOfSink> blocks_of_;  // of each sink
  std::vector<Cost> arc_;                // [from, to]
  std::vector<Cost> now_;                // the minima of a block without the sample that leaves
};

}  // namespace assignment
}  // namespace moe_opt
