// The buffers that messages are sent from, shared by all peers: which are free, and how many a peer
// holds. Knows nothing of rails but their registration at the start. Called by the classes of this
// room only.
#pragma once

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "transport/ofi/requests.h"
#include "transport/ofi/resource.h"

namespace smddp::ofi {

class RailSet;

class SendBuffers {
 public:
  Status set_up(RailSet& rails);
  void add_peer() { held_.push_back({}); }  // peers are numbered in this order

  // nullptr: none is free, or the peer holds its share.
  MessageSend* acquire(Peer to, bool control);
  // Frees a buffer that was acquired and not posted.
  void release(MessageSend* send);

  // From post() to take_back() a buffer is with libfabric or in a peer's FIFO.
  void post(const MessageSend*) { ++posted_; }
  void take_back(MessageSend* send) {
    --posted_;
    if (send->pending != nullptr) --*std::exchange(send->pending, nullptr);
    release(send);
  }
  bool idle() const { return posted_ == 0; }

 private:
  Mapping slab_;
  std::vector<MessageSend> sends_;
  RequestQueue<MessageSend> free_[2];        // data, control
  std::vector<std::array<size_t, 2>> held_;  // by peer: acquired and not freed yet, likewise
  size_t posted_ = 0;
};

}  // namespace smddp::ofi
