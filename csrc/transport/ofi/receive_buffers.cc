#include "transport/ofi/receive_buffers.h"

namespace smddp::fabric {

int ReceiveBuffers::post_all(fid_ep* endpoint, uint8_t rail, Slab slab, MrHandle mr, size_t count,
                             size_t bytes) {
  slab_ = std::move(slab);
  mr_ = std::move(mr);
  endpoint_ = endpoint;
  bytes_ = bytes;
  slots_.resize(count);
  unposted_.reserve(count);
  std::byte* at = slab_.data();
  for (ReceiveSlot& slot : slots_) {
    slot.kind = SlotKind::kReceive;
    slot.rail = rail;
    slot.data = at;
    at += bytes;
    repost(&slot);
  }
  return error_;
}

void ReceiveBuffers::repost(ReceiveSlot* slot) {
  void* descriptor = mr_ ? ::fi_mr_desc(mr_.get()) : nullptr;
  ssize_t rc = ::fi_recv(endpoint_, slot->data, bytes_, descriptor, FI_ADDR_UNSPEC, &slot->context);
  if (rc == 0) {
    ++posted_;
    return;
  }
  unposted_.push_back(slot);
  if (rc != -FI_EAGAIN && error_ == 0) error_ = static_cast<int>(rc);
}

int ReceiveBuffers::repost_refused() {
  for (size_t n = unposted_.size(); n > 0 && error_ == 0; --n) {
    ReceiveSlot* slot = unposted_.front();
    unposted_.erase(unposted_.begin());
    repost(slot);
  }
  return error_;
}

void ReceiveBuffers::cancel_all() {
  for (ReceiveSlot& slot : slots_) (void)::fi_cancel(&endpoint_->fid, &slot.context);
}

}  // namespace smddp::fabric
