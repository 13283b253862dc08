// Sends the contents of message buffers: messages, and chunks that the caller has written into a
// buffer. What is not taken at once waits in a FIFO per peer: a peer that does not answer delays
// only the messages to it. The groups acquire and post buffers; the Endpoint passes completions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/ofi/endpoint.h"
#include "transport/wire.h"

namespace smddp::fabric {

struct SendSlot;

struct SendBuffer {
  std::byte* data;  // registered if the provider asks for it
  size_t capacity;  // Endpoint::max_message() for data, kControlMessage for control
};

class MessageSender {
 public:
  MessageSender(RailSet& rails, PeerTable& peers, SendBuffers& buffers)
      : rails_(rails), peers_(peers), buffers_(buffers) {}

  // A buffer for one message to `to`. nullptr: none is free, or `to` holds its share of them, until
  // Endpoint::progress() has reaped a completion. `control` messages have buffers of their own, so
  // that they never starve behind data. Of each kind a peer may hold as many as are still free: one
  // peer that stalls takes at most half, k peers leave 1/(k+1).
  SendBuffer* acquire(Peer to, bool control);
  // Sends the first `size` bytes of `buffer` to the peer it was acquired for, and takes it back. A
  // message to a lost peer is dropped.
  void post(SendBuffer* buffer, size_t size);
  // Sends them as chunk `index` of the region that the peer granted. If `pending` is not nullptr, it is
  // incremented now and decremented once the buffer is free again.
  void post_chunk(SendBuffer* buffer, const wire::Grant& grant, uint32_t index, size_t bytes,
                  uint32_t* pending);
  // Gives back a buffer without sending it.
  void release(SendBuffer* buffer);

  // A send has completed, or completed with an error that loses the peer.
  void on_sent(SendSlot* slot);
  void on_failed(SendSlot* slot, const Status& why);

  // Tries again the messages that wait. How many it has sent or dropped.
  int retry_stalled();

 private:
  void enqueue(SendSlot* slot);
  // False: there is no room now. True: started, or dropped because it was refused for good, which loses the
  // peer.
  bool try_send(SendSlot* slot);

  RailSet& rails_;
  PeerTable& peers_;
  SendBuffers& buffers_;
};

}  // namespace smddp::fabric
