// One collective: blocks of rows to and from the ranks of a c10d process group.
//
// All-to-all, all-gather, reduce-scatter (up to the sum) and send/receive are the same thing here: what this rank sends
// to each peer and where it puts what each peer sends. Block sizes are free, so uneven counts need neither padding nor
// copies, and rows go from and to the places where they are. On NCCL it is one grouped call; on Gloo a send and a
// receive for each peer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "executor.h"

namespace moe_opt {
namespace pipeline {

// Rows [first, first + count) for each rank of a group.
using RowBlocks = std::vector<std::pair<int64_t, int64_t>>;

// Contiguous rows in blocks. A block becomes a tensor when it is asked for: all exchanges of a schedule are made before
// the first begins, while a GPU has nothing to do.
class BlocksOfRows {
 public:
  BlocksOfRows(const at::Tensor& rows, RowBlocks blocks);

  size_t size() const { return blocks_.size(); }
  at::Device device() const { return bytes_.device(); }
  bool is_empty(size_t block) const { return blocks_[block].second * row_bytes_ == 0; }
  // The bytes of a block.
  at::Tensor operator[](size_t block) const;
  // Those of all blocks, but of `without` none.
  std::vector<at::Tensor> tensors(size_t without) const;

 private:
  at::Tensor bytes_;  // of all rows
  int64_t row_bytes_;
  RowBlocks blocks_;
};

class Exchange : public Action {
 public:
  // Block p of `sent` goes to rank p of the group, that of `received` comes from it; any of them may be empty, all are
  // on one device. The own blocks are copied, unless they are the same memory. Rows travel as bytes: what looks for
  // NaNs in messages (TORCH_NCCL_NAN_CHECK) would take the bits of a probability between half-precision elements for
  // one.
  Exchange(c10::intrusive_ptr<c10d::ProcessGroup> group, BlocksOfRows sent, BlocksOfRows received);
  ~Exchange() override;

  // On Gloo returns when every block has arrived and left, each within the group's timeout; on NCCL when all is issued.
  // Throws PeerError.
  void run() override;
  void join() override;
  void abort() override;

  // The halves of run(): what begin() leaves under way on Gloo, finish() waits for.
  virtual void begin();
  void finish();

 private:
  void begin_on_gloo(c10d::Backend& backend);

  struct Transfer {
    c10::intrusive_ptr<c10d::Work> work;
    int peer;
  };

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const BlocksOfRows sent_;
  const BlocksOfRows received_;
  std::mutex mutex_;  // guards transfers_ and aborted_
  std::vector<Transfer> transfers_;
  bool aborted_ = false;
  bool complete_ = false;                   // of what begin() left under way on Gloo
  c10::intrusive_ptr<c10d::Work> running_;  // NCCL's; it also holds on to what it reads and writes until it is joined
};

// As exchange.finish(), in a thread that no executor interrupts: give_up_waits does.
void wait_for(Exchange& exchange);

// Has what threads of this process wait for with wait_for fail, if anything. To be called until they have returned: one
// may be about to begin.
void give_up_waits();

}  // namespace pipeline
}  // namespace moe_opt
