#include "transport/ofi/receive_buffers.h"

namespace smddp::ofi {

int ReceiveBuffers::post_all(fid_ep* endpoint, uint8_t rail, Mapping slab, MrHandle mr,
                             size_t count, size_t bytes) {
  slab_ = std::move(slab);
  mr_ = std::move(mr);
  endpoint_ = endpoint;
  bytes_ = bytes;
  receives_.resize(count);
  unposted_.reserve(count);
  std::byte* at = slab_.data();
  for (MessageReceive& receive : receives_) {
    receive.kind = Request::Kind::kReceive;
    receive.rail = rail;
    receive.data = at;
    at += bytes;
    repost(&receive);
  }
  return error_;
}

void ReceiveBuffers::repost(MessageReceive* receive) {
  void* descriptor = mr_ ? ::fi_mr_desc(mr_.get()) : nullptr;
  ssize_t rc =
      ::fi_recv(endpoint_, receive->data, bytes_, descriptor, FI_ADDR_UNSPEC, &receive->context);
  if (rc == 0) {
    ++posted_;
    return;
  }
  unposted_.push_back(receive);
  if (rc != -FI_EAGAIN && error_ == 0) error_ = static_cast<int>(rc);
}

int ReceiveBuffers::repost_refused() {
  for (size_t n = unposted_.size(); n > 0 && error_ == 0; --n) {
    MessageReceive* receive = unposted_.front();
    unposted_.erase(unposted_.begin());
    repost(receive);
  }
  return error_;
}

void ReceiveBuffers::cancel_all() {
  for (MessageReceive& receive : receives_) (void)::fi_cancel(&endpoint_->fid, &receive.context);
}

}  // namespace smddp::ofi
