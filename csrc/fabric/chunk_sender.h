// Sends chunks from the caller's memory into regions of peers, by writes or by tagged messages.
// Called by Endpoint only.
#pragma once

#include <string>
#include <vector>

#include "fabric/peer_table.h"

namespace smddp::fabric {

class ChunkSender {
 public:
  ChunkSender(RailSet& rails, PeerTable& peers);

  // As Endpoint::send_chunk().
  bool send(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data, size_t bytes,
            uint32_t* pending);

  // A chunk has completed, or completed with an error that loses the peer.
  void on_sent(ChunkSendSlot* slot);
  void on_failed(ChunkSendSlot* slot, const std::string& why);

  bool idle() const { return free_.size() == slots_.size(); }

 private:
  RailSet& rails_;
  PeerTable& peers_;
  std::vector<ChunkSendSlot> slots_;
  SlotQueue<ChunkSendSlot> free_;
};

}  // namespace smddp::fabric
