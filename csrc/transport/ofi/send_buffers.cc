#include "transport/ofi/send_buffers.h"

#include <cassert>

#include "transport/ofi/rail_set.h"

namespace smddp::ofi {

Status SendBuffers::set_up(RailSet& rails) {
  if (Status s = Mapping::map(kDataSends * rails.max_message() + kControlSends * kControlMessage,
                              MAP_PRIVATE)
                     .into(slab_);
      !s)
    return s;
  for (size_t rail = 0; rail < rails.size(); ++rail) {
    if (Status status = rails[rail].adopt(slab_); !status) return status;
  }
  sends_.resize(kDataSends + kControlSends);
  std::byte* at = slab_.data();
  for (size_t i = 0; i < sends_.size(); ++i) {
    MessageSend& send = sends_[i];
    send.kind = Request::Kind::kSend;
    send.control = i >= kDataSends;
    send.data = at;
    send.capacity = send.control ? kControlMessage : rails.max_message();
    at += send.capacity;
    free_[send.control].push(&send);
  }
  return Status();
}

// Dynamic threshold (Choudhury and Hahne, 1998) with factor 1.
MessageSend* SendBuffers::acquire(Peer to, bool control) {
  assert(to < held_.size());
  RequestQueue<MessageSend>& free = free_[control];
  if (held_[to][control] >= free.size()) return nullptr;
  MessageSend* send = free.pop();
  send->to = to;
  ++held_[to][control];
  return send;
}

void SendBuffers::release(MessageSend* send) {
  --held_[send->to][send->control];
  free_[send->control].push_front(send);  // the next message finds it in the processor's cache
}

}  // namespace smddp::ofi
