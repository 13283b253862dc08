// What the core asks of a network: bounded messages from registered buffers into registered buffers, and chunks
// straight into memory that the receiver has opened for one sender, a region. Both arrive in any order, unless
// Facts::ordered says otherwise. Knows nothing of groups, ranks and operations, and of no network in
// particular: transport/ofi implements it over libfabric, tools/simulator in virtual time, the tests inside one
// process. Not thread-safe: called under the engine's lock, by the engine and by the groups that it drives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "transport/wire.h"

namespace smddp::transport {

using Peer = uint32_t;  // index of an added peer, dense from 0

// The most bytes that a control message may have.
inline constexpr size_t kControlMessage = 4096;

// Bytes for a header and `payload` bytes, in whole cache lines.
constexpr size_t message_of(size_t payload) {
  return (sizeof(wire::Header) + payload + 63) / 64 * 64;
}

// The largest payload of a message that is sent at once, without a rendezvous, unless the user has
// set another limit. With its header: kEagerMessage. Messages of 32 and 64 KiB saved 2 % of 64 KiB on 2 x 1 and lost 10 % of
// 256 KiB on 4 x 1 (2026-11-22, AMD EPYC).
inline constexpr size_t kEagerPayload = 16 << 10;
inline constexpr size_t kEagerMessage = message_of(kEagerPayload);

// The largest message of all, with its header, and its payload.
inline constexpr size_t kMaxPayload = 128 << 10;
inline constexpr size_t kMaxMessage = message_of(kMaxPayload);

// Where a message is written before it is sent.
struct MessageBuffer {
  std::byte* data;
  size_t capacity;  // Facts::max_message for data, kControlMessage for control
};

// Takes the messages that arrive, and the losses of peers.
class Sink {
 public:
  virtual ~Sink() = default;
  // `data` is valid during the call only.
  virtual void on_message(const std::byte* data, size_t size) = 0;
  // A message or chunk to `to` could not be sent; nothing further will reach that peer.
  virtual void on_peer_lost(Peer to, const Status& why) = 0;
  // Something has arrived or completed, and an exception kept the transport from seeing to it: it may
  // never be told. The transport goes on.
  virtual void on_exception(const Status&) {}
};

// What stays as it is while the transport is open.
struct Facts {
  std::vector<uint8_t> address;  // what peers need to reach this process
  std::string ip;                // of the first NIC; empty if its address is no IP address
  std::string rails;             // "tcp on eth0 (192.0.2.2), eth1 (192.0.2.18)"
  std::string description;       // the same with the version and the path of the library
  std::string links;  // the NICs, with what tells each from another one: hardware address and rate
  size_t nics = 1;
  size_t max_message = 0;  // bytes, of data
  bool writes = false;     // there are regions and chunks; false: only messages
  // A message is taken after the chunks that were written before it to the same peer, unless a connection between
  // them broke: then arrived() tells what is missing. False: in any order; a chunk is in the receiver's memory once
  // its sending has completed. Until then its bytes may come more than once, as over EFA (fi_efa(7),
  // FI_OPT_EFA_WRITE_IN_ORDER_ALIGNED_128_BYTES); later they don't: fi_cq(3) has the operation no longer depend on the
  // network. An ordered network takes them once.
  bool ordered = false;
};

struct Counters {
  uint64_t messages_sent = 0, bytes_sent = 0;  // handed to the network
  uint64_t messages_received = 0, bytes_received = 0;
  uint64_t chunks_sent = 0, chunk_bytes_sent = 0;
  uint64_t foreign_writes = 0;  // that no member of the job makes
  uint64_t regions = 0;         // open now
};

// Whose memory the network reads and writes by itself.
struct MemoryOwner {
  enum class Kind : uint8_t { kHost, kCuda };  // kHost: memory of a simulated device
  Kind kind = Kind::kHost;
  int ordinal = 0;  // CUDA's number of the device
};

class Transport {
 public:
  virtual ~Transport() = default;

  const Facts& facts() const { return facts_; }
  virtual const Counters& counters() const = 0;

  // --- peers

  // Equal addresses give the same Peer, until it is lost: then a new one. Connects on first use. Both sides of a
  // region must have added each other before it is opened. kInvalid: an address of another kind of network.
  virtual Result<Peer> add_peer(const std::vector<uint8_t>& address) = 0;
  // Gives a peer up: messages to it are dropped, and the sink is told.
  virtual void give_up(Peer peer, const std::string& why) = 0;
  virtual bool is_lost(Peer peer) const = 0;
  virtual bool has_lost_peers() const = 0;

  // --- messages

  // A buffer for one message, or one chunk, to `to`. nullptr: none is free, or `to` holds its share of them,
  // until poll() has reaped a completion. `control` messages have buffers of their own, so that they never
  // starve behind data.
  virtual MessageBuffer* acquire(Peer to, bool control) = 0;
  // Sends the first `size` bytes of `buffer` to the peer it was acquired for, and takes it back. A message to a
  // lost peer is dropped.
  virtual void post(MessageBuffer* buffer, size_t size) = 0;

  // --- chunks

  // Lets `from`, and no other peer, write [memory, memory + bytes). Fills `address` and `keys` of the grant, which
  // the sender needs, and `*region`. False: no region is free, or the memory can't be registered; then the data
  // has to travel in messages.
  virtual bool open_region(Peer from, std::byte* memory, size_t bytes, uint32_t* region,
                           wire::Grant* grant) = 0;
  // How many chunks have come. SIZE_MAX if they are not counted: the sender's transport is not ordered.
  virtual size_t arrived(uint32_t /*region*/) const { return SIZE_MAX; }
  // Whether the owner of the region's memory sees all that has been written. For lent memory, asked once all
  // chunks have been written; the first question begins what makes it so. Else true at once.
  virtual bool visible(uint32_t region) = 0;
  // Ends the sender's right to write into the region's memory. `abandoned`: chunks may still come. They go nowhere if this
  // side chooses keys and addresses, as over tcp, so that other groups keep the connection; else one that comes
  // breaks the connection to its sender. The memory has to outlive the transport then: half a chunk may have arrived.
  virtual void close_region(uint32_t region, bool abandoned) = 0;

  // Writes `bytes` bytes as chunk `index` of the region that `to` granted, and increments *pending. `data` must stay
  // valid and unchanged until poll() has decremented *pending again; it does so after an error too, of which the
  // sink is told. False: no room, try again after poll(). A chunk to a lost peer is dropped, and *pending stays
  // as it is.
  virtual bool write(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data,
                     size_t bytes, uint32_t* pending) = 0;
  // Writes the first `bytes` bytes of `buffer` likewise, and takes it back. If `pending` is not nullptr, it is
  // incremented now and decremented once the buffer is free again.
  virtual void write(MessageBuffer* buffer, const wire::Grant& grant, uint32_t index, size_t bytes,
                     uint32_t* pending) = 0;

  // --- memory of devices

  // Ok if chunks may be sent from, and regions lie in, memory of `owner` that was lent; else why not.
  virtual Status reaches(const MemoryOwner& owner) const = 0;
  // The network may use [at, at + bytes) until take_back(). The processor never touches that memory.
  virtual Status lend(std::byte* at, size_t bytes, const MemoryOwner& owner) = 0;
  virtual void take_back(std::byte* at) = 0;

  // --- progress

  // Reaps completions, gives the messages that have arrived to the sink, and tries again the operations that wait.
  // How many events it handled; an error: the transport has failed for good. The sink may call every function but
  // poll().
  virtual Result<int> poll(Sink& sink) = 0;
  // No message or chunk that was sent is still here. The network may hold copies: keep the transport until the
  // peers have answered.
  virtual bool idle() const = 0;
  // Turns readable when poll() has work; -1 if the network has no such file descriptor.
  virtual int wait_fd() const = 0;
  // Right before a sleep on wait_fd(): the longest, in milliseconds; -1: no limit.
  virtual int sleep_limit_ms() = 0;
  // The last call. False: the network may use memory that was sent from, or written into, for the rest of the process.
  virtual bool close() = 0;

 protected:
  Facts facts_;
};

using Open = std::function<Result<std::unique_ptr<Transport>>()>;

}  // namespace smddp::transport
