// The peers of an endpoint: their addresses, the messages that wait for each, and which are lost.
// Knows nothing of groups and ranks. Called by the classes of this folder only.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/ofi/rail_set.h"
#include "transport/ofi/send_buffers.h"

namespace smddp::ofi {

struct PeerState {
  PeerAddress address;
  bool takes_writes = false;          // it can write into regions of this endpoint
  RequestQueue<MessageSend> waiting;  // FIFO of messages that have not been taken yet
  size_t chunks = 0;                  // ChunkSendSlots with libfabric
  bool lost = false;
  bool stalled = false;  // in PeerTable::stalled()
};

class PeerTable {
 public:
  PeerTable(RailSet& rails, SendBuffers& buffers) : rails_(rails), buffers_(buffers) {}

  // Equal addresses give the same Peer, until it is lost. A peer that was lost is a new one, so that
  // what the older groups still send to it stays dropped.
  Result<Peer> add(const std::vector<uint8_t>& published);
  size_t size() const { return peers_.size(); }
  PeerState& operator[](Peer peer) { return peers_[peer]; }

  // Puts a message at the end of its peer's FIFO.
  void wait(MessageSend* send);
  // Peers whose FIFO is not empty.
  std::vector<Peer>& stalled() { return stalled_; }

  // Marks the peer as lost and drops the messages that wait for it.
  void lose(Peer peer, Status why);
  bool has_losses() const { return !losses_.empty(); }
  bool has_lost() const { return has_lost_; }
  // Tells the sink of each loss once; how many there were.
  int tell_losses(Sink& sink);

 private:
  struct Loss {
    Peer peer;
    Status why;
  };

  RailSet& rails_;
  SendBuffers& buffers_;
  std::deque<PeerState> peers_;  // grows during callbacks; elements stay where they are
  std::unordered_map<std::string, Peer> known_;  // by published address
  std::vector<Peer> stalled_;
  std::vector<Loss> losses_;  // not told yet
  bool has_lost_ = false;
};

}  // namespace smddp::ofi
