// Sends the contents of message buffers: messages, and chunks that the caller has written into a
// buffer. A buffer that libfabric does not take at once waits in a FIFO per peer. Called by
// Endpoint only.
#pragma once

#include <string>

#include "fabric/peer_table.h"

namespace smddp::fabric {

class MessageSender {
 public:
  MessageSender(RailSet& rails, PeerTable& peers, SendBuffers& buffers)
      : rails_(rails), peers_(peers), buffers_(buffers) {}

  // As Endpoint::post() and Endpoint::post_chunk().
  void post(SendSlot* slot, size_t size);
  void post_chunk(SendSlot* slot, const wire::Grant& grant, uint32_t index, size_t bytes);

  // A send has completed, or completed with an error that loses the peer.
  void on_sent(SendSlot* slot);
  void on_failed(SendSlot* slot, const std::string& why);

  // Tries again the messages that wait. How many it has sent or dropped.
  int retry_stalled();

 private:
  void enqueue(SendSlot* slot);
  // False: libfabric has no room now. True: started, or dropped because libfabric has refused it
  // for good, which loses the peer.
  bool try_send(SendSlot* slot);

  RailSet& rails_;
  PeerTable& peers_;
  SendBuffers& buffers_;
};

}  // namespace smddp::fabric
