// Nothing here allocates, locks or formats text per message, except for an error.
#include "fabric/message_sender.h"

#include <cassert>

namespace smddp::fabric {

void MessageSender::post(SendSlot* slot, size_t size) {
  assert(size <= slot->capacity);
  slot->size = size;
  slot->chunk = false;
  enqueue(slot);
}

void MessageSender::post_chunk(SendSlot* slot, const wire::Grant& grant, uint32_t index,
                               size_t bytes) {
  assert(bytes <= slot->capacity && bytes <= grant.chunk_bytes);
  slot->size = bytes;
  slot->chunk = true;
  slot->grant = grant;
  slot->index = index;
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
    size_t rail = rails_.rail_of_chunk(to, slot->index);
    rc = rails_.send_chunk(slot, rail, to, slot->grant, slot->index, slot->data, slot->size,
                           rails_[rail].sends_descriptor());
  } else {
    rc = rails_.send(slot, to, slot->data, slot->size);
  }
  if (rc == 0) return true;
  if (rc == -FI_EAGAIN) return false;
  Peer peer = slot->to;
  buffers_.take_back(slot);
  peers_.lose(peer, "a message could not be sent: " + rails_.refusal(rc, slot->rail));
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

void MessageSender::on_failed(SendSlot* slot, const std::string& why) {
  Peer to = slot->to;
  on_sent(slot);
  peers_.lose(to, "a message could not be sent: " + why);
}

}  // namespace smddp::fabric
