// Writes chunks from the caller's memory into regions of peers. The Endpoint calls it, and passes completions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/ofi/peer_table.h"
#include "transport/ofi/requests.h"

namespace smddp::ofi {

class ChunkSender {
 public:
  ChunkSender(RailSet& rails, PeerTable& peers);

  // As Transport::write(), from the caller's memory.
  bool write(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data, size_t bytes,
             uint32_t* pending);

  // A chunk has completed, or completed with an error that loses the peer.
  void on_sent(ChunkWrite* chunk);
  void on_failed(ChunkWrite* chunk, const Status& why);

  bool idle() const { return free_.size() == writes_.size(); }

 private:
  RailSet& rails_;
  PeerTable& peers_;
  std::vector<ChunkWrite> writes_;
  RequestQueue<ChunkWrite> free_;
};

}  // namespace smddp::ofi
