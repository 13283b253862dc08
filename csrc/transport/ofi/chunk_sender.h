// Sends chunks from the caller's memory into regions of peers, by writes or by tagged messages. The
// groups call send(); the Endpoint passes completions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/ofi/endpoint.h"
#include "transport/ofi/slot_queue.h"
#include "transport/wire.h"

namespace smddp::fabric {

struct ChunkSendSlot;

class ChunkSender {
 public:
  ChunkSender(RailSet& rails, PeerTable& peers);
  ~ChunkSender();

  // Sends `bytes` bytes as chunk `index` of the region that `to` granted, and increments *pending.
  // `data` must stay valid and unchanged until Endpoint::progress() has decremented *pending again;
  // it does so after an error too, of which Sink::on_peer_lost() then tells. Chunks of one region
  // must be sent in rising order of `index`. False: no room, try again after progress(). A chunk to
  // a lost peer is dropped, and *pending stays as it is.
  bool send(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data, size_t bytes,
            uint32_t* pending);

  // A chunk has completed, or completed with an error that loses the peer.
  void on_sent(ChunkSendSlot* slot);
  void on_failed(ChunkSendSlot* slot, const Status& why);

  bool idle() const;

 private:
  RailSet& rails_;
  PeerTable& peers_;
  std::vector<ChunkSendSlot> slots_;
  SlotQueue<ChunkSendSlot> free_;
};

}  // namespace smddp::fabric
