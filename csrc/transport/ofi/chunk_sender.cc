// Nothing here allocates, locks or formats text per chunk, except for an error and if a provider
// has memory registered for each use.
#include "transport/ofi/chunk_sender.h"

#include <algorithm>
#include <cassert>

namespace smddp::ofi {

ChunkSender::ChunkSender(RailSet& rails, PeerTable& peers)
    : rails_(rails), peers_(peers), writes_(rails.writes() ? kChunkWrites : 0) {
  for (ChunkWrite& chunk : writes_) {
    chunk.kind = Request::Kind::kWrite;
    free_.push(&chunk);
  }
}

bool ChunkSender::write(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data,
                        size_t bytes, uint32_t* pending) {
  assert(to < peers_.size() && bytes <= grant.chunk_bytes);
  PeerState& peer = peers_[to];
  if (peer.lost) return true;
  // After all messages that wait already, and with the threshold of SendBuffers::acquire().
  size_t share = std::min(kChunkWritesPerPeer, free_.size());
  if (!peer.waiting.empty() || peer.chunks >= share) return false;
  Rail& rail = rails_.rail_of_chunk(index);
  Registrations& registrations = rail.registrations();
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
  ChunkWrite* chunk = free_.pop();
  ssize_t rc = rails_.write(rail, chunk, peer.address, grant, index, {data, bytes},
                            registration != nullptr ? registration->descriptor() : nullptr);
  if (rc == 0) {
    chunk->to = to;
    chunk->size = bytes;
    chunk->pending = pending;
    chunk->registration = registration;
    ++*pending;
    ++peer.chunks;
    return true;
  }
  if (registration != nullptr) registrations.give_back(registration);
  free_.push_front(chunk);
  if (rc == -FI_EAGAIN) return false;
  peers_.lose(to, rails_.refusal("a chunk could not be sent", rc, rail));
  return true;
}

void ChunkSender::on_sent(ChunkWrite* chunk) {
  rails_.finished(*chunk, chunk->size);
  --peers_[chunk->to].chunks;
  --*chunk->pending;
  if (chunk->registration != nullptr) {
    rails_[chunk->rail].registrations().give_back(chunk->registration);
  }
  free_.push_front(chunk);
}

void ChunkSender::on_failed(ChunkWrite* chunk, const Status& why) {
  Peer to = chunk->to;
  on_sent(chunk);
  peers_.lose(to, {why.code(), "a chunk could not be sent: " + why.message()});
}

}  // namespace smddp::ofi
