// Sends the contents of message buffers: messages, and chunks that the caller has written into a
// buffer. What is not taken at once waits in a FIFO per peer: a peer that does not answer delays
// only the messages to it. The Endpoint calls it, and passes completions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/ofi/peer_table.h"
#include "transport/ofi/requests.h"
#include "transport/ofi/send_buffers.h"

namespace smddp::ofi {

class MessageSender {
 public:
  MessageSender(RailSet& rails, PeerTable& peers, SendBuffers& buffers)
      : rails_(rails), peers_(peers), buffers_(buffers) {}

  // As Transport's post(), and write() from a buffer.
  void post(MessageBuffer* buffer, size_t size);
  void write(MessageBuffer* buffer, const wire::Grant& grant, uint32_t index, size_t bytes,
             uint32_t* pending);

  // A send has completed, or completed with an error that loses the peer.
  void on_sent(MessageSend* send);
  void on_failed(MessageSend* send, const Status& why);

  // Tries again the messages that wait. How many it has sent or dropped.
  int retry_stalled();

 private:
  void enqueue(MessageSend* send);
  // False: there is no room now. True: started, or dropped because it was refused for good, which loses the
  // peer.
  bool try_send(MessageSend* send);

  RailSet& rails_;
  PeerTable& peers_;
  SendBuffers& buffers_;
};

}  // namespace smddp::ofi
