// Nothing here allocates, locks or formats text per chunk, except for an error and if a provider
// has memory registered for each use.
#include "transport/ofi/chunk_sender.h"

#include <algorithm>
#include <cassert>

#include "transport/ofi/chunk.h"
#include "transport/ofi/peer_table.h"
#include "transport/ofi/rail_set.h"
#include "transport/ofi/slots.h"

namespace smddp::fabric {

ChunkSender::ChunkSender(RailSet& rails, PeerTable& peers)
    : rails_(rails),
      peers_(peers),
      slots_(rails.transfer() == Transfer::kMessages ? 0 : kChunkSends) {
  for (ChunkSendSlot& slot : slots_) {
    slot.kind = SlotKind::kChunkSend;
    free_.push(&slot);
  }
}

ChunkSender::~ChunkSender() = default;

bool ChunkSender::idle() const { return free_.size() == slots_.size(); }

bool ChunkSender::send(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data,
                       size_t bytes, uint32_t* pending) {
  assert(to < peers_.size() && bytes <= grant.chunk_bytes);
  PeerState& peer = peers_[to];
  if (peer.lost) return true;
  // After all messages that wait already, and with the threshold of SendBuffers::acquire().
  size_t share = std::min(kChunkSendsPerPeer, free_.size());
  if (!peer.waiting.empty() || peer.chunks >= share) return false;
  Rail& rail = rails_[rails_.rail_of_chunk(peer.address, index)];
  MrCache& registrations = rail.registrations();
  Registration* registration = nullptr;
  if (rail.local_registration() || registrations.is_lent(data)) {
    registration = registrations.take(data, bytes, Access::kSend);
    if (registration == nullptr) {
      // The limit on pinned memory may allow it once other chunks have completed.
      if (peer.chunks > 0) return false;
      peers_.lose(
          to, {Code::kUnavailable, "a chunk could not be sent: " + registrations.error().message() +
                                       " (" + rail.text() + ")"});
      return true;
    }
  }
  ChunkSendSlot* slot = free_.pop();
  ssize_t rc = start({grant, index, data, bytes}, rails_, rail, slot, peer.address,
                     registration != nullptr ? registration->descriptor() : nullptr);
  rails_.on_chunk_started(rail, bytes, rc);
  if (rc == 0) {
    slot->to = to;
    slot->size = bytes;
    slot->pending = pending;
    slot->registration = registration;
    ++*pending;
    ++peer.chunks;
    return true;
  }
  if (registration != nullptr) registrations.give_back(registration);
  free_.push_front(slot);
  if (rc == -FI_EAGAIN) return false;
  peers_.lose(to, rails_.refusal("a chunk could not be sent", rc, rail));
  return true;
}

void ChunkSender::on_sent(ChunkSendSlot* slot) {
  rails_.finished(*slot, slot->size);
  --peers_[slot->to].chunks;
  --*slot->pending;
  if (slot->registration != nullptr) {
    rails_[slot->rail].registrations().give_back(slot->registration);
  }
  free_.push_front(slot);
}

void ChunkSender::on_failed(ChunkSendSlot* slot, const Status& why) {
  Peer to = slot->to;
  on_sent(slot);
  peers_.lose(to, {why.code(), "a chunk could not be sent: " + why.message()});
}

}  // namespace smddp::fabric
