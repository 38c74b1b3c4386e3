#include "exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

namespace moe_opt {
namespace pipeline {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Messages between two ranks of a group arrive in the order in which they were sent, and a schedule gives every rank of
// a group the same order: one tag serves all. It only has to differ from the tags of other users of the group.
constexpr int kTag = 0x6d6f65;

// The groups of exchanges that failed, were given up, or were begun and never waited for. Their messages may still be
// under way, and a later exchange would take them for its own: with rows of the same size without a word.
class SpoiltGroups {
 public:
  void add(const Group& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_.emplace_back(group);
  }

  bool contains(const Group& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(groups_.begin(), groups_.end(), [&](const auto& one) { return one.lock() == group; });
  }

 private:
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> groups_;
};

SpoiltGroups spoilt;

}  // namespace

BlocksOfRows::BlocksOfRows(const at::Tensor& rows, RowBlocks blocks) : blocks_(std::move(blocks)) {
  const at::AutoDispatchBelowADInplaceOrView moves_bytes_only;
  bytes_ = rows.view(-1).view(at::kByte);
  row_bytes_ = bytes_.numel() / std::max<int64_t>(1, rows.size(0));
}

at::Tensor BlocksOfRows::operator[](size_t block) const {
  const auto [first, count] = blocks_[block];
  return bytes_.narrow(0, first * row_bytes_, count * row_bytes_);
}

std::vector<at::Tensor> BlocksOfRows::tensors(size_t without) const {
  std::vector<at::Tensor> tensors(size(), bytes_.narrow(0, 0, 0));
  for (size_t block = 0; block < size(); ++block) {
    if (block != without && !is_empty(block)) tensors[block] = (*this)[block];
  }
  return tensors;
}

Exchange::Exchange(c10::intrusive_ptr<c10d::ProcessGroup> group, BlocksOfRows sent, BlocksOfRows received)
    : group_(std::move(group)), sent_(std::move(sent)), received_(std::move(received)) {
  const size_t size = group_->getSize();
  if (sent_.size() != size || received_.size() != size) {
    throw std::invalid_argument("an exchange needs one block to and one from each of the " + std::to_string(size) +
                                " ranks, but has " + std::to_string(sent_.size()) + " and " +
                                std::to_string(received_.size()));
  }
}

Exchange::~Exchange() {
  if (!transfers_.empty() && !complete_) spoilt.add(group_);
}

void Exchange::run() {
  begin();
  finish();
}

void Exchange::begin() {
  const at::AutoDispatchBelowADInplaceOrView moves_bytes_only;  // a lane's thread would record gradients
  const int rank = group_->getRank();
  const auto copy_own = [&] {
    if (sent_.is_empty(rank)) return;
    const at::Tensor own = sent_[rank], place = received_[rank];
    if (own.const_data_ptr() != place.const_data_ptr()) place.copy_(own, /*non_blocking=*/true);
  };
  const c10::intrusive_ptr<c10d::Backend> backend = group_->getBackend(sent_.device().type());
  if (backend->getBackendName() == "gloo") {
    copy_own();
    begin_on_gloo(*backend);
  } else {
    std::vector<at::Tensor> received = received_.tensors(rank), sent = sent_.tensors(rank);
    running_ = backend->alltoall(received, sent);
    copy_own();  // beside it: NCCL would wait for what is queued before it
  }
}

void Exchange::join() {
  if (running_) running_->wait();
}

void Exchange::begin_on_gloo(c10d::Backend& backend) {
  if (spoilt.contains(group_)) {
    throw std::runtime_error(
        "messages of an exchange that failed may still be under way in it: make its group anew, "
        "or start the job again");
  }
  const int rank = group_->getRank(), size = group_->getSize();
  std::vector<Transfer> transfers;
  std::optional<PeerError> failure;
  const auto issue = [&](int peer, bool receives) {
    const BlocksOfRows& blocks = receives ? received_ : sent_;
    if (blocks.is_empty(peer)) return;
    std::vector<at::Tensor> block{blocks[peer]};
    try {
      transfers.push_back({receives ? backend.recv(block, peer, kTag) : backend.send(block, peer, kTag), peer});
    } catch (const std::exception& error) {  // the others get what is theirs, or would wait for this rank
      if (!failure) failure.emplace(error.what(), peer);
    }
  };
  // Everybody starts with the next rank, so that no rank is everybody's first.
  for (int step = 1; step < size; ++step) issue((rank + size - step) % size, true);
  for (int step = 1; step < size; ++step) issue((rank + step) % size, false);
  std::lock_guard<std::mutex> lock(mutex_);
  transfers_ = std::move(transfers);
  if (aborted_) {
    for (const Transfer& transfer : transfers_) transfer.work->abort();
  }
  if (failure) {
    if (!transfers_.empty()) spoilt.add(group_);
    throw *failure;
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
    std::string reason = "given up";
    try {
      complete = work->wait();
    } catch (const std::exception& error) {
      reason = error.what();
    }
    if (!complete) {
      spoilt.add(group_);
      throw PeerError(reason, peer);
    }
  }
  complete_ = true;
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
