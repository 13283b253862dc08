// The process's door to the network, shared by all its groups, over one NIC or several. Two ways:
// bounded messages from registered buffers into registered buffers, and chunks straight into memory
// that the receiver opened for one sender (a region). Both arrive in any order. The only door to
// libfabric; nothing of its headers shows here. Not thread-safe: the progress engine alone calls it.
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

// Bytes a control message may have.
inline constexpr size_t kControlMessage = 4096;

// Room for a header and `payload` bytes, in whole cache lines.
constexpr size_t message_of(size_t payload) {
  return (sizeof(wire::Header) + payload + 63) / 64 * 64;
}

// Payload of a message that goes out at once, without a rendezvous, unless the user has set another limit.
inline constexpr size_t kEagerPayload = 16 << 10;
inline constexpr size_t kEagerMessage = message_of(kEagerPayload);

struct SendBuffer {
  std::byte* data;  // registered where the provider asks for it
  size_t capacity;  // Endpoint::max_message() for data, kControlMessage for control
};

// How chunks travel. kMessages: not at all, there are only messages.
enum class Transfer : uint8_t { kMessages, kTagged, kWrites };

// Whose memory the network is to read and write by itself.
struct MemoryOwner {
  enum class Kind : uint8_t { kHost, kCuda };  // kHost: for what plays a device
  Kind kind = Kind::kHost;
  int ordinal = 0;  // CUDA's number of the device
};

// What a region's owner hears of it.
class ChunkObserver {
 public:
  virtual ~ChunkObserver() = default;
  // Chunk `index` is in memory, whole. Each index comes once, in any order.
  virtual void on_chunk(uint32_t index) = 0;
};

class Sink {
 public:
  virtual ~Sink() = default;
  // `data` is valid during the call only.
  virtual void on_message(const std::byte* data, size_t size) = 0;
  // A message to `to` could not be sent; nothing further will reach it.
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
  // the provider where those are real (efa, verbs), otherwise the first that is not loopback.
  std::string interface;
  std::string transfer = {};   // "writes", "tagged", "messages"; empty: the provider's faster one
  bool device_memory = false;  // NICs are to read and write GPUs' memory (FI_HMEM) where they can
};

// What SMDDP_FABRIC_PROVIDER, SMDDP_FABRIC_INTERFACE, SMDDP_FABRIC_TRANSFER and SMDDP_FABRIC_HMEM ask
// for; SMDDP_LIBFABRIC is the search's own.
Options options_from_env();

class Endpoint {
 public:
  // kUnavailable with a sentence that names the library, provider or interface and the remedy.
  static Result<std::unique_ptr<Endpoint>> open(const Options& options);
  virtual ~Endpoint() = default;

  virtual const std::vector<uint8_t>& address() const = 0;
  // "tcp;ofi_rxm on lo (127.0.0.1), libfabric 1.17"; with all its NICs
  virtual const std::string& description() const = 0;
  virtual size_t max_message() const = 0;
  virtual const Counters& counters() const = 0;

  // Equal addresses give the same Peer. Connects on first use. Both sides of a region must have added
  // each other before it is opened: EFA drops writes of those it does not know.
  virtual Result<Peer> add_peer(const std::vector<uint8_t>& address) = 0;

  // A buffer for one message to `to`. nullptr: none is free, or `to` holds its share of them, until
  // progress() has reaped a completion. `control` messages have buffers of their own, so that they
  // never starve behind data. Of each kind a peer may hold as many as are still free: one peer that
  // stalls takes at most half, k peers leave 1/(k+1).
  virtual SendBuffer* acquire(Peer to, bool control) = 0;
  // Sends the first `size` bytes of `buffer` to the peer it was acquired for, and takes it back.
  // Messages the provider can't take yet wait in a FIFO per peer; a peer that does not answer holds
  // up nobody else's. To a peer that is lost: drops it.
  virtual void post(SendBuffer* buffer, size_t size) = 0;
  // Gives back a buffer without sending it.
  virtual void release(SendBuffer* buffer) = 0;

  virtual Transfer transfer() const = 0;
  // Lets `from`, and nobody else, fill `memory` in chunks of `chunk_bytes`, the last one shorter.
  // What the sender has to know goes into *grant. `observer` hears of every chunk until the region is
  // closed. False: no region is free, the memory can't be registered, or transfer() is kMessages;
  // then it has to be messages.
  virtual bool open_region(Peer from, std::byte* memory, size_t bytes, size_t chunk_bytes,
                           ChunkObserver* observer, wire::Grant* grant) = 0;
  // `complete`: every chunk has arrived. Otherwise the region's number is never used again, and what
  // its sender has not sent yet may still be written: the memory has to outlive the endpoint. To take
  // its right to write away would break the connection to it with all else that is under way.
  virtual void close_region(uint32_t region, bool complete) = 0;
  // Sends `bytes` bytes as chunk `index` of the region that `to` granted. `data` must keep, and stay
  // as it is, until *pending, which this increments, has been decremented again by progress(); that
  // happens on errors, too, after which on_peer_lost() tells. Chunks of one region go in rising
  // order of `index`. False: no room, try again after progress(). To a peer that is lost: drops it.
  virtual bool send_chunk(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data,
                          size_t bytes, uint32_t* pending) = 0;
  // The same from a buffer acquired for `to`, which it takes back. Never refuses: waits in the FIFO.
  virtual void post_chunk(SendBuffer* buffer, const wire::Grant& grant, uint32_t index,
                          size_t bytes) = 0;

  // Ok where chunks may go out of, and regions lie in, memory of `owner` that was lent; else why not.
  virtual Status reaches(const MemoryOwner& owner) const = 0;
  // The network may use [at, at + bytes) until take_back(). The processor never touches what lies there:
  // flows there must be chunks. A region's last chunk is told only when the owner sees all of them.
  virtual Status lend(std::byte* at, size_t bytes, const MemoryOwner& owner) = 0;
  // Where a region there was closed before it was complete, the memory has to outlive the endpoint.
  virtual void take_back(std::byte* at) = 0;

  // Reaps completions, delivers what has arrived, retries what waits. How many events it handled.
  // The sink may call everything here but progress().
  virtual Result<int> progress(Sink& sink) = 0;
  // True when no message posted so far is still with libfabric or in a FIFO. The provider may hold
  // copies yet: keep the endpoint until the peers have answered.
  virtual bool idle() const = 0;

  // File descriptor that turns readable when progress() has work, or -1 where the provider has
  // none: then poll. Sleeping on it is allowed only right after may_sleep() said true, and no
  // longer than sleep_limit_ms() (-1: no limit): ofi_rxm loses a wake-up now and then while it
  // connects or moves a large message, and messages in a FIFO are retried by progress() alone.
  virtual int wait_fd() const = 0;
  virtual bool may_sleep() = 0;
  virtual int sleep_limit_ms() const = 0;
};

}  // namespace smddp::fabric
