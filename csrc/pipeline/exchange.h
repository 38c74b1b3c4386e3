// One collective: blocks of rows to and from the ranks of a c10d process group.
//
// All-to-all, all-gather, reduce-scatter (up to the sum) and send/receive are the same thing here: what this rank sends
// to each peer and where it puts what each peer sends. Block sizes are free, so uneven counts need neither padding nor
// copies, and rows go from and to the places where they are. On NCCL it is one grouped call; on Gloo a send and a
// receive for each peer.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "executor.h"

namespace moe_opt {
namespace pipeline {

class Exchange : public Action {
 public:
  // sent[p] goes to rank p of the group, received[p] comes from it; contiguous, any of them may be empty, all on one
  // device. The own blocks are copied, unless they are the same memory. Rows travel as bytes: what looks for NaNs in
  // messages (TORCH_NCCL_NAN_CHECK) would take the bits of a probability between half-precision elements for one.
  Exchange(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<at::Tensor> sent,
           std::vector<at::Tensor> received);

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
  std::vector<at::Tensor> sent_;
  std::vector<at::Tensor> received_;
  std::mutex mutex_;  // guards transfers_ and aborted_
  std::vector<Transfer> transfers_;
  bool aborted_ = false;
  c10::intrusive_ptr<c10d::Work> running_;  // NCCL's; it also holds on to what it reads and writes until it is joined
};

// As exchange.finish(), in a thread that no executor interrupts: give_up_waits does.
void wait_for(Exchange& exchange);

// Has what threads of this process wait for with wait_for fail, if anything. To be called until they have returned:
// Gloo forgets it where a wait is just about to begin.
void give_up_waits();

}  // namespace pipeline
}  // namespace moe_opt
