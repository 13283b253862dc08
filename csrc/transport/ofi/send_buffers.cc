#include "transport/ofi/send_buffers.h"

#include <cassert>

#include "transport/ofi/rail_set.h"

namespace smddp::fabric {

Status SendBuffers::set_up(RailSet& rails) {
  Result<Slab> slab = Slab::map(kDataSends * rails.max_message() + kControlSends * kControlMessage);
  if (!slab) return slab.status();
  slab_ = std::move(slab.value());
  for (size_t rail = 0; rail < rails.size(); ++rail) {
    if (Status status = rails[rail].adopt(slab_); !status) return status;
  }
  slots_.resize(kDataSends + kControlSends);
  std::byte* at = slab_.data();
  for (size_t i = 0; i < slots_.size(); ++i) {
    SendSlot& slot = slots_[i];
    slot.kind = SlotKind::kSend;
    slot.control = i >= kDataSends;
    slot.data = at;
    slot.capacity = slot.control ? kControlMessage : rails.max_message();
    at += slot.capacity;
    free_[slot.control].push(&slot);
  }
  return Status();
}

// Dynamic threshold (Choudhury and Hahne, 1998) with factor 1.
SendSlot* SendBuffers::acquire(Peer to, bool control) {
  assert(to < held_.size());
  SlotQueue<SendSlot>& free = free_[control];
  if (held_[to][control] >= free.size()) return nullptr;
  SendSlot* slot = free.pop();
  slot->to = to;
  ++held_[to][control];
  return slot;
}

void SendBuffers::release(SendSlot* slot) {
  --held_[slot->to][slot->control];
  free_[slot->control].push_front(slot);  // the next message finds it in the processor's cache
}

}  // namespace smddp::fabric
