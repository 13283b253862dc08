// The process's endpoint on the network, shared by all its groups, over one NIC or several. It
// offers two services: bounded messages from registered buffers into registered buffers, and chunks
// straight into memory that the receiver has opened for one sender (a region). Both arrive in any
// order.
//
// The rooms above need no other header of this room but wire.h, and it shows nothing of libfabric's
// headers. Knows nothing of groups, ranks and operations. Not thread-safe: called under the
// progress engine's lock, by the engine and by the groups that it drives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "fabric/wire.h"

namespace smddp::fabric {

using Peer = uint32_t;  // index of an added peer, dense from 0

// The most bytes that a control message may have.
inline constexpr size_t kControlMessage = 4096;

// Bytes for a header and `payload` bytes, in whole cache lines.
constexpr size_t message_of(size_t payload) {
  return (sizeof(wire::Header) + payload + 63) / 64 * 64;
}

// The largest payload of a message that is sent at once, without a rendezvous, unless the user has
// set another limit.
inline constexpr size_t kEagerPayload = 16 << 10;
inline constexpr size_t kEagerMessage = message_of(kEagerPayload);

struct SendBuffer {
  std::byte* data;  // registered if the provider asks for it
  size_t capacity;  // Endpoint::max_message() for data, kControlMessage for control
};

// How chunks travel. kMessages: there are no chunks, only messages.
enum class Transfer : uint8_t { kMessages, kTagged, kWrites };

// Whose memory the network reads and writes by itself.
struct MemoryOwner {
  enum class Kind : uint8_t { kHost, kCuda };  // kHost: memory of a simulated device
  Kind kind = Kind::kHost;
  int ordinal = 0;  // CUDA's number of the device
};

// Is told of the chunks of one region.
class ChunkObserver {
 public:
  virtual ~ChunkObserver() = default;
  // All bytes of chunk `index` are in memory. Each index is told once, in any order.
  virtual void on_chunk(uint32_t index) = 0;
};

// Takes the messages that arrive, and the losses of peers.
class Sink {
 public:
  virtual ~Sink() = default;
  // `data` is valid during the call only.
  virtual void on_message(const std::byte* data, size_t size) = 0;
  // A message to `to` could not be sent; nothing further will reach that peer.
  virtual void on_peer_lost(Peer to, const Status& why) = 0;
};

struct Counters {
  uint64_t messages_sent = 0, bytes_sent = 0;  // handed to libfabric
  uint64_t messages_received = 0, bytes_received = 0;
  uint64_t retries = 0;         // -FI_EAGAIN answers
  uint64_t receive_errors = 0;  // messages lost on arrival: truncated, or their connection broke
  uint64_t chunks_sent = 0, chunk_bytes_sent = 0;
  uint64_t chunks_received = 0;
  uint64_t foreign_chunks = 0;                        // arrived for no region, or a second time
  uint64_t registrations = 0, registration_hits = 0;  // asked of the provider; found in the cache
};

struct Options {
  std::string library;   // path of libfabric; empty: SMDDP_LIBFABRIC, /opt/amazon/efa, the loader
  std::string provider;  // empty: the best that fi_getinfo offers
  // Domain name, interface or source IP address, or several with commas between. Empty: all NICs of
  // the provider if they are real (efa, verbs), otherwise the first that is not loopback.
  std::string interface;
  std::string transfer = {};   // "writes", "tagged", "messages"; empty: the provider's faster one
  bool device_memory = false;  // NICs are to read and write GPUs' memory (FI_HMEM) if they can
};

// The values of SMDDP_FABRIC_PROVIDER, SMDDP_FABRIC_INTERFACE, SMDDP_FABRIC_TRANSFER and
// SMDDP_FABRIC_HMEM. The loader reads SMDDP_LIBFABRIC.
Options options_from_env();

class ChunkReceiver;
class ChunkSender;
class MessageSender;
class PeerTable;
class Rail;
class RailSet;
class SendBuffers;
struct Event;

// Owns one class per job (messages, chunks to send, chunks to receive) over the rails that they
// share, and gives each completion to the class that has started the operation.
class Endpoint {
 public:
  // kUnavailable with a sentence that names the library, provider or interface and the remedy.
  static Result<std::unique_ptr<Endpoint>> open(const Options& options);
  ~Endpoint();

  const std::vector<uint8_t>& address() const;
  // "tcp;ofi_rxm on lo (127.0.0.1), libfabric 1.17"; with all its NICs
  const std::string& description() const;
  size_t max_message() const;
  Transfer transfer() const;
  const Counters& counters() const;

  // Equal addresses give the same Peer. Connects on first use. Both sides of a region must have
  // added each other before it is opened: EFA drops writes from an endpoint that has not been
  // added.
  Result<Peer> add_peer(const std::vector<uint8_t>& address);

  // A buffer for one message to `to`. nullptr: none is free, or `to` holds its share of them, until
  // progress() has reaped a completion. `control` messages have buffers of their own, so that they
  // never starve behind data. Of each kind a peer may hold as many as are still free: one peer that
  // stalls takes at most half, k peers leave 1/(k+1).
  SendBuffer* acquire(Peer to, bool control);
  // Sends the first `size` bytes of `buffer` to the peer it was acquired for, and takes it back.
  // Messages that the provider can't take yet wait in a FIFO per peer: a peer that does not answer
  // delays only the messages to it. A message to a lost peer is dropped.
  void post(SendBuffer* buffer, size_t size);
  // Gives back a buffer without sending it.
  void release(SendBuffer* buffer);

  // Lets `from`, and no other peer, fill `memory` in chunks of `chunk_bytes`, the last one shorter.
  // Fills *grant, which the sender needs. `observer` is told of every chunk until the
  // region is closed. False: no region is free, the memory can't be registered, or transfer() is
  // kMessages; then the data has to travel in messages.
  bool open_region(Peer from, std::byte* memory, size_t bytes, size_t chunk_bytes,
                   ChunkObserver* observer, wire::Grant* grant);
  // `complete`: every chunk has arrived. Otherwise the region's number is never used again, and
  // chunks that its sender has not sent yet may still be written: the memory has to outlive the
  // endpoint. Revoking the sender's right to write would break the connection to it, with all other
  // traffic on it.
  void close_region(uint32_t region, bool complete);
  // Sends `bytes` bytes as chunk `index` of the region that `to` granted, and increments *pending.
  // `data` must stay valid and unchanged until progress() has decremented *pending again; it does
  // so after an error too, of which on_peer_lost() then tells. Chunks of one region must be sent in
  // rising order of `index`. False: no room, try again after progress(). A chunk to a lost peer is
  // dropped, and *pending stays as it is.
  bool send_chunk(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data,
                  size_t bytes, uint32_t* pending);
  // The same from a buffer acquired for the peer, which it takes back. Never refuses: waits in the
  // FIFO.
  void post_chunk(SendBuffer* buffer, const wire::Grant& grant, uint32_t index, size_t bytes);

  // Ok if chunks may be sent from, and regions lie in, memory of `owner` that was lent; else why
  // not.
  Status reaches(const MemoryOwner& owner) const;
  // The network may use [at, at + bytes) until take_back(). The processor never touches that
  // memory: flows there must be chunks. The observer of a region there is told of the last chunk
  // once the owner sees all chunks.
  Status lend(std::byte* at, size_t bytes, const MemoryOwner& owner);
  // If a region there was closed before it was complete, the memory has to outlive the endpoint.
  void take_back(std::byte* at);

  // Reaps completions, gives the messages that have arrived to the sink and the chunks to their
  // observers, and tries again the operations that wait. Returns how many events it handled. The
  // sink may call every function of the endpoint but progress().
  Result<int> progress(Sink& sink);
  // True if no message posted so far is still with libfabric or in a FIFO. The provider may still
  // hold copies: keep the endpoint until the peers have answered.
  bool idle() const;

  // File descriptor that turns readable when progress() has work, or -1 if the provider has none:
  // then poll. Sleeping on it is allowed only right after may_sleep() has returned true, and no
  // longer than sleep_limit_ms() (-1: no limit): ofi_rxm loses a wake-up now and then while it
  // connects or moves a large message, and only progress() retries the messages in a FIFO.
  int wait_fd() const;
  bool may_sleep();
  int sleep_limit_ms() const;

 private:
  explicit Endpoint(std::unique_ptr<RailSet> rails);
  void handle(Rail& rail, const Event& event, Sink& sink);
  void handle_failure(Rail& rail, const Event& event);
  void count_receive_error(const std::string& why);

  // Memory that libfabric uses comes before the rails: members are destroyed from the last to the
  // first.
  std::unique_ptr<SendBuffers> buffers_;
  std::unique_ptr<PeerTable> peers_;
  std::unique_ptr<MessageSender> messages_;
  std::unique_ptr<ChunkSender> chunks_;
  std::unique_ptr<ChunkReceiver> receiver_;
  std::unique_ptr<RailSet> rails_;
};

}  // namespace smddp::fabric
