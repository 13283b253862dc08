#include "transport/ofi/peer_table.h"

#include <utility>

#include "common/descriptors.h"

namespace smddp::ofi {

Result<Peer> PeerTable::add(const std::vector<uint8_t>& published) {
  Result<PublishedAddress> address = rails_.unpack(published);
  if (!address) return address.status();
  std::string key(published.begin(), published.end());
  auto found = known_.find(key);
  if (found != known_.end() && !peers_[found->second].lost) return found->second;

  Result<PeerAddress> inserted = rails_.insert(address.value());
  if (!inserted) return inserted.status();
  PeerState peer;
  peer.address = inserted.value();
  peer.takes_writes = rails_.writes() && address.value().writes;
  // Over TCP: one connection, or one from each side.
  make_room_for_descriptors(2 * (peers_.size() + 1), "connections to many ranks");
  peers_.push_back(peer);
  stalled_.reserve(peers_.size());
  buffers_.add_peer();
  Peer index = static_cast<Peer>(peers_.size() - 1);
  known_[std::move(key)] = index;
  return index;
}

void PeerTable::wait(MessageSend* send) {
  PeerState& peer = peers_[send->to];
  peer.waiting.push(send);
  if (peer.stalled) return;
  peer.stalled = true;
  stalled_.push_back(send->to);
}

void PeerTable::lose(Peer peer, Status why) {
  PeerState& state = peers_[peer];
  if (state.lost) return;
  state.lost = has_lost_ = true;
  while (!state.waiting.empty()) buffers_.take_back(state.waiting.pop());
  losses_.push_back({peer, std::move(why)});
}

// The sink may post, and so lose another peer: the next call tells of it.
int PeerTable::tell_losses(Sink& sink) {
  std::vector<Loss> losses = std::exchange(losses_, {});
  for (const Loss& loss : losses) sink.on_peer_lost(loss.peer, loss.why);
  return static_cast<int>(losses.size());
}

}  // namespace smddp::ofi
