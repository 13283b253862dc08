// Nothing here allocates, locks or formats text per message, except for an error.
#include "transport/ofi/message_sender.h"

#include <cassert>

namespace smddp::ofi {

void MessageSender::post(MessageBuffer* buffer, size_t size) {
  assert(size <= buffer->capacity);
  auto* send = static_cast<MessageSend*>(buffer);
  send->size = size;
  send->chunk = false;
  enqueue(send);
}

void MessageSender::write(MessageBuffer* buffer, const wire::Grant& grant, uint32_t index,
                          size_t bytes, uint32_t* pending) {
  assert(bytes <= buffer->capacity && bytes <= grant.chunk_bytes);
  auto* send = static_cast<MessageSend*>(buffer);
  send->size = bytes;
  send->chunk = true;
  send->grant = grant;
  send->index = index;
  send->pending = pending;
  if (pending != nullptr) ++*pending;
  enqueue(send);
}

void MessageSender::enqueue(MessageSend* send) {
  const PeerState& peer = peers_[send->to];
  buffers_.post(send);
  if (peer.lost) return buffers_.take_back(send);
  if (peer.waiting.empty() && try_send(send)) return;
  peers_.wait(send);
}

bool MessageSender::try_send(MessageSend* send) {
  const PeerAddress& to = peers_[send->to].address;
  ssize_t rc;
  if (send->chunk) {
    Rail& rail = rails_.rail_of_chunk(send->index);
    rc = rails_.write(rail, send, to, send->grant, send->index, {send->data, send->size},
                      rail.sends_descriptor());
  } else {
    rc = rails_.send(send, to, {send->data, send->size});
  }
  if (rc == 0) return true;
  if (rc == -FI_EAGAIN) return false;
  Peer peer = send->to;
  buffers_.take_back(send);
  peers_.lose(peer, rails_.refusal("a message could not be sent", rc, rails_[send->rail]));
  return true;
}

int MessageSender::retry_stalled() {
  int handled = 0;
  std::vector<Peer>& stalled = peers_.stalled();
  size_t kept = 0;
  for (size_t i = 0; i < stalled.size(); ++i) {
    PeerState& peer = peers_[stalled[i]];
    while (!peer.waiting.empty()) {
      MessageSend* send = peer.waiting.pop();
      if (!try_send(send)) {
        peer.waiting.push_front(send);
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

void MessageSender::on_sent(MessageSend* send) {
  rails_.finished(*send, send->size);
  buffers_.take_back(send);
}

void MessageSender::on_failed(MessageSend* send, const Status& why) {
  Peer to = send->to;
  on_sent(send);
  peers_.lose(to, {why.code(), "a message could not be sent: " + why.message()});
}

}  // namespace smddp::ofi
