#include "flows/local_peers.h"

#include <algorithm>
#include <utility>

namespace smddp {

void LocalPeers::add(Rank rank, std::unique_ptr<intranode::Inbox> inbox,
                     std::shared_ptr<intranode::Neighbor> neighbor) {
  ranks_.push_back(rank);
  inboxes_.push_back(std::move(inbox));
  neighbors_.push_back(std::move(neighbor));
  popped_since_wake_.push_back(false);
}

bool LocalPeers::all_attached() {
  if (!outbox_) return true;
  return outbox_->all_attached() &&
         std::all_of(inboxes_.begin(), inboxes_.end(),
                     [&](const auto& inbox) { return inbox->all_attached(count()); });
}

bool LocalPeers::may_read_memory() const {
  if (!outbox_) return true;
  return !outbox_->any_denied() &&
         std::none_of(inboxes_.begin(), inboxes_.end(),
                      [](const auto& inbox) { return inbox->any_denied(); });
}

void LocalPeers::push(intranode::Lane lane, const intranode::Piece& piece) {
  outbox_->publish(lane, piece);
  pushed_since_wake_ = true;
}

void LocalPeers::pop(intranode::Lane lane, int i) {
  inbox(i).pop(lane);
  popped_since_wake_[static_cast<size_t>(i)] = true;
}

size_t LocalPeers::reach(intranode::Lane lane, int i, size_t offset, const std::byte** at) {
  const intranode::Piece& piece = *inbox(i).head(lane);
  if (piece.extents == 0) {
    *at = inbox(i).bytes(lane) + offset;
    return piece.bytes - offset;
  }
  for (uint32_t e = 0; e < piece.extents; ++e) {
    const intranode::Extent extent = inbox(i).extents(lane)[e];
    if (offset < extent.bytes) {
      size_t bytes = extent.bytes - offset;
      *at = neighbor(i).find(extent.address + offset, bytes);
      return *at == nullptr ? 0 : bytes;
    }
    offset -= extent.bytes;
  }
  return 0;
}

void LocalPeers::abort(const std::string& reason, uint64_t from, intranode::GaveUp how) {
  if (!outbox_) return;
  outbox_->abort(reason, from, how);
  pushed_since_wake_ = true;
}

void LocalPeers::wake() {
  for (size_t i = 0; i < neighbors_.size(); ++i) {
    if (pushed_since_wake_ || popped_since_wake_[i]) neighbors_[i]->wake();
    popped_since_wake_[i] = false;
  }
  pushed_since_wake_ = false;
}

}  // namespace smddp
