#include "planning/exchange_plan.h"

#include <algorithm>
#include <numeric>

#include "planning/counts.h"

namespace moe_opt::planning {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 40;  // of a rank for an expert: sums over ranks and chunks stay in range

// Where the chunks of n rows end, without a division of 64-bit numbers for each.
struct Cut {
  int64_t whole, rest;  // n = whole * chunks + rest
  int64_t chunks;

  Cut(int64_t rows, int64_t chunks) : whole(rows / chunks), rest(rows - whole * chunks), chunks(chunks) {}
  int64_t end(int64_t chunk) const { return whole * chunk + rest * chunk / chunks; }
  int64_t rows(int64_t chunk) const { return chunks == 1 ? whole : end(chunk + 1) - end(chunk); }
};

}  // namespace

int64_t num_blocks(const Counts& counts, int64_t num_chunks) {
  return num_chunks * counts.etp_size * counts.ep_size * counts.local;
}

std::vector<ChunkPlan> plan_exchange(const Counts& counts, int64_t num_chunks, int64_t targets, int64_t* source_rows,
                                     int64_t* target_rows, int64_t* row_counts, int64_t* tokens_per_expert) {
  const int64_t ep = counts.ep_size, etp = counts.etp_size, local = counts.local, experts = ep * local;
  const int64_t peers = etp * ep, of_chunk = peers * local, chunks_of_target = num_chunks / targets;
  std::vector<ChunkPlan> plan(num_chunks, {ChunkPlan::Numbers(ep), {static_cast<size_t>(etp), ChunkPlan::Numbers(ep)}});

  const int64_t* own = counts.rows + (counts.ep_rank * etp + counts.etp_rank) * experts;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const Cut cut(checked(own[expert], kMostRows), num_chunks);
    for (int64_t c = 0; c < num_chunks; ++c) plan[c].sent[expert / local] += cut.rows(c);
  }

  std::fill_n(tokens_per_expert, targets * local, 0);
  for (int64_t t = 0; t < etp; ++t) {
    for (int64_t e = 0; e < ep; ++e) {
      const int64_t* rows = counts.rows + (e * etp + t) * experts + counts.ep_rank * local;
      for (int64_t l = 0; l < local; ++l) {
        const Cut cut(checked(rows[l], kMostRows), num_chunks);
        for (int64_t c = 0; c < num_chunks; ++c) {
          const int64_t number = cut.rows(c);
          row_counts[c * of_chunk + (t * ep + e) * local + l] = number;
          plan[c].arriving[t][e] += number;
          plan[c].gathered += number;
          tokens_per_expert[c / chunks_of_target * local + l] += number;
        }
      }
    }
  }

  for (int64_t target = 0; target < targets; ++target) {
    const int64_t blocks = chunks_of_target * of_chunk, first = target * blocks;
    int64_t row = 0;
    for (int64_t block = first; block < first + blocks; ++block) {
      source_rows[block] = row;
      row += row_counts[block];
    }
    row = 0;
    for (int64_t l = 0; l < local; ++l) {
      for (int64_t peer = 0; peer < peers; ++peer) {
        for (int64_t c = 0; c < chunks_of_target; ++c) {
          const int64_t block = first + c * of_chunk + peer * local + l;
          target_rows[block] = row;
          row += row_counts[block];
        }
      }
    }
  }

  const auto sum = [](const ChunkPlan::Numbers& numbers) {
    return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
  };
  for (int64_t c = 1; c < num_chunks; ++c) {
    if (c % chunks_of_target == 0) continue;
    const ChunkPlan& before = plan[c - 1];
    plan[c].first_sent = before.first_sent + sum(before.sent);
    plan[c].first_received = before.first_received + sum(before.arriving[counts.etp_rank]);
    plan[c].first_gathered = before.first_gathered + before.gathered;
  }
  return plan;
}

Shares share_out(const Counts& counts, const int64_t* tp_ranks, int64_t tp_size, int64_t partitions, int64_t* sent) {
  const int64_t ranks = counts.ep_size * counts.etp_size, experts = counts.ep_size * counts.local;
  const int64_t parts = partitions * tp_size;
  Shares shares{std::vector<ChunkPlan::Numbers>(parts, ChunkPlan::Numbers(counts.ep_size))};
  std::vector<int64_t> of_rest(parts);  // what a rank's part of a partition has of so many rows that do not divide
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (tp_ranks[rank] < 0 || tp_ranks[rank] >= tp_size)
      throw std::invalid_argument("tp_ranks holds what is no TP rank");
    for (int64_t partition = 0; partition < partitions; ++partition) {
      const int64_t part = partition * tp_size + tp_ranks[rank];
      int64_t* sent_of_rank = sent + (partition * ranks + rank) * experts;
      for (int64_t rest = 0; rest < parts; ++rest) of_rest[rest] = Cut(rest, parts).rows(part);
      for (int64_t expert = 0; expert < experts; ++expert) {
        const int64_t rows = checked(counts.rows[rank * experts + expert], kMostRows);
        // Numbers of 32 bits are divided in less time, and these nearly always are.
        const int64_t whole = rows >> 32 ? rows / parts : static_cast<uint32_t>(rows) / static_cast<uint32_t>(parts);
        sent_of_rank[expert] = whole + of_rest[rows - whole * parts];
        if (partition == 0) shares.total += rows;
      }
    }
  }
  const int64_t* own = counts.rows + (counts.ep_rank * counts.etp_size + counts.etp_rank) * experts;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const Cut cut(own[expert], parts);
    for (int64_t part = 0; part < parts; ++part) shares.own[part][expert / counts.local] += cut.rows(part);
  }
  return shares;
}

}  // namespace moe_opt::planning
