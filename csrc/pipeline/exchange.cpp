#include "exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <set>
#include <utility>

namespace moe_opt {
namespace pipeline {
namespace {

// Messages between two ranks of a group arrive in the order in which they were sent, and a schedule gives every rank of
// a group the same order: one tag serves all. It only has to differ from the tags of other users of the group.
constexpr int kTag = 0x6d6f65;

std::vector<at::Tensor> as_bytes(std::vector<at::Tensor> blocks) {
  const at::AutoDispatchBelowADInplaceOrView moves_bytes_only;
  for (at::Tensor& block : blocks) block = block.view(at::kByte);
  return blocks;
}

}  // namespace

Exchange::Exchange(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<at::Tensor> sent,
                   std::vector<at::Tensor> received)
    : group_(std::move(group)), sent_(as_bytes(std::move(sent))), received_(as_bytes(std::move(received))) {
  const size_t size = group_->getSize();
  if (sent_.size() != size || received_.size() != size) {
    throw std::invalid_argument("an exchange needs one block to and one from each of the " + std::to_string(size) +
                                " ranks, but has " + std::to_string(sent_.size()) + " and " +
                                std::to_string(received_.size()));
  }
}

void Exchange::run() {
  begin();
  finish();
}

void Exchange::begin() {
  const at::AutoDispatchBelowADInplaceOrView moves_bytes_only;  // a lane's thread would record gradients
  const int rank = group_->getRank();
  const at::Tensor own = sent_[rank], place = received_[rank];
  sent_[rank] = own.narrow(0, 0, 0);
  received_[rank] = place.narrow(0, 0, 0);
  const auto copy_own = [&] {
    if (own.numel() > 0 && own.const_data_ptr() != place.const_data_ptr()) place.copy_(own, /*non_blocking=*/true);
  };
  const c10::intrusive_ptr<c10d::Backend> backend = group_->getBackend(own.device().type());
  if (backend->getBackendName() == "gloo") {
    copy_own();
    begin_on_gloo(*backend);
  } else {
    running_ = backend->alltoall(received_, sent_);
    copy_own();  // beside it: NCCL would wait for what is queued before it
  }
}

void Exchange::join() {
  if (running_) running_->wait();
}

void Exchange::begin_on_gloo(c10d::Backend& backend) {
  const int rank = group_->getRank(), size = group_->getSize();
  std::vector<Transfer> transfers;
  const auto issue = [&](int peer, at::Tensor& block, bool receives) {
    if (block.numel() == 0) return;
    std::vector<at::Tensor> blocks{block};
    try {
      transfers.push_back({receives ? backend.recv(blocks, peer, kTag) : backend.send(blocks, peer, kTag), peer});
    } catch (const std::exception& error) {
      throw PeerError(error.what(), peer);
    }
  };
  // Everybody starts with the next rank, so that no rank is everybody's first.
  for (int step = 1; step < size; ++step)
    issue((rank + size - step) % size, received_[(rank + size - step) % size], true);
  for (int step = 1; step < size; ++step) issue((rank + step) % size, sent_[(rank + step) % size], false);
  std::lock_guard<std::mutex> lock(mutex_);
  transfers_ = std::move(transfers);
  if (aborted_) {
    for (const Transfer& transfer : transfers_) transfer.work->abort();
  }
}

void Exchange::finish() {
  std::vector<Transfer> transfers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    transfers = transfers_;
  }
  for (const auto& [work, peer] : transfers) {
    bool complete = false;
    try {
      complete = work->wait();
    } catch (const std::exception& error) {
      throw PeerError(error.what(), peer);
    }
    if (!complete) throw PeerError("given up", peer);
  }
}

void Exchange::abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  for (const Transfer& transfer : transfers_) transfer.work->abort();
}

namespace {

std::mutex waits_mutex;  // guards waits
std::set<Exchange*> waits;

}  // namespace

void wait_for(Exchange& exchange) {
  struct Wait {
    explicit Wait(Exchange& exchange) : exchange(exchange) {
      const std::lock_guard<std::mutex> lock(waits_mutex);
      waits.insert(&exchange);
    }
    ~Wait() {
      const std::lock_guard<std::mutex> lock(waits_mutex);
      waits.erase(&exchange);
    }
    Exchange& exchange;
  };
  const Wait wait(exchange);
  exchange.finish();
}

void give_up_waits() {
  const std::lock_guard<std::mutex> lock(waits_mutex);
  for (Exchange* exchange : waits) exchange->abort();
}

}  // namespace pipeline
}  // namespace moe_opt
