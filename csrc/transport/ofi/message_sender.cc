// Nothing here allocates, locks or formats text per message, except for an error.
#include "transport/ofi/message_sender.h"

#include <cassert>

#include "transport/ofi/chunk.h"
#include "transport/ofi/peer_table.h"
#include "transport/ofi/rail_set.h"
#include "transport/ofi/send_buffers.h"
#include "transport/ofi/slots.h"

namespace smddp::fabric {

SendBuffer* MessageSender::acquire(Peer to, bool control) { return buffers_.acquire(to, control); }

void MessageSender::release(SendBuffer* buffer) {
  buffers_.release(static_cast<SendSlot*>(buffer));
}

void MessageSender::post(SendBuffer* buffer, size_t size) {
  assert(size <= buffer->capacity);
  auto* slot = static_cast<SendSlot*>(buffer);
  slot->size = size;
  slot->chunk = false;
  enqueue(slot);
}

void MessageSender::post_chunk(SendBuffer* buffer, const wire::Grant& grant, uint32_t index,
                               size_t bytes, uint32_t* pending) {
  assert(bytes <= buffer->capacity && bytes <= grant.chunk_bytes);
  auto* slot = static_cast<SendSlot*>(buffer);
  slot->size = bytes;
  slot->chunk = true;
  slot->grant = grant;
  slot->index = index;
  slot->pending = pending;
  if (pending != nullptr) ++*pending;
  enqueue(slot);
}

void MessageSender::enqueue(SendSlot* slot) {
  const PeerState& peer = peers_[slot->to];
  buffers_.post(slot);
  if (peer.lost) return buffers_.take_back(slot);
  if (peer.waiting.empty() && try_send(slot)) return;
  peers_.wait(slot);
}

bool MessageSender::try_send(SendSlot* slot) {
  const PeerAddress& to = peers_[slot->to].address;
  ssize_t rc;
  if (slot->chunk) {
    Rail& rail = rails_[rails_.rail_of_chunk(to, slot->index)];
    rc = start({slot->grant, slot->index, slot->data, slot->size}, rails_, rail, slot, to,
               rail.sends_descriptor());
    rails_.on_chunk_started(rail, slot->size, rc);
  } else {
    rc = rails_.send(slot, to, slot->data, slot->size);
  }
  if (rc == 0) return true;
  if (rc == -FI_EAGAIN) return false;
  Peer peer = slot->to;
  buffers_.take_back(slot);
  peers_.lose(peer, rails_.refusal("a message could not be sent", rc, rails_[slot->rail]));
  return true;
}

int MessageSender::retry_stalled() {
  int handled = 0;
  std::vector<Peer>& stalled = peers_.stalled();
  size_t kept = 0;
  for (size_t i = 0; i < stalled.size(); ++i) {
    PeerState& peer = peers_[stalled[i]];
    while (!peer.waiting.empty()) {
      SendSlot* slot = peer.waiting.pop();
      if (!try_send(slot)) {
        peer.waiting.push_front(slot);
        break;
      }
      ++handled;
    }
    if (peer.waiting.empty()) {
      peer.stalled = false;
    } else {
      stalled[kept++] = stalled[i];
    }
  }
  stalled.resize(kept);
  return handled;
}

void MessageSender::on_sent(SendSlot* slot) {
  rails_.finished(*slot, slot->size);
  buffers_.take_back(slot);
}

void MessageSender::on_failed(SendSlot* slot, const Status& why) {
  Peer to = slot->to;
  on_sent(slot);
  peers_.lose(to, {why.code(), "a message could not be sent: " + why.message()});
}

}  // namespace smddp::fabric
