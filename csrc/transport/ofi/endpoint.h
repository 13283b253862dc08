// The process's endpoint on the network, shared by all its groups, over one NIC or several. It
// offers two services: bounded messages from registered buffers into registered buffers
// (MessageSender; the Sink takes those that arrive), and chunks straight into memory that the
// receiver has opened for one sender, a region (ChunkSender, ChunkReceiver). Both arrive in any
// order.
//
// The rooms above need this header, those of the three services and wire.h, which show nothing of
// libfabric's headers. Knows nothing of groups, ranks and operations. Not thread-safe: called under
// the progress engine's lock, by the engine and by the groups that it drives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "transport/ofi/types.h"
#include "transport/wire.h"

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
static_assert(message_of(kEagerPayload) == kEagerMessage);

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
  // Something has arrived or completed, and an exception kept the endpoint from seeing to it: it may
  // never be told. The endpoint goes on.
  virtual void on_exception(const Status&) {}
};

// The values of SMDDP_FABRIC_PROVIDER, SMDDP_FABRIC_INTERFACE, and of transfer and hmem in SMDDP_DEBUG. The
// loader reads SMDDP_LIBFABRIC.
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
  // False: libfabric may use memory that was sent from, or written into, for the rest of the process.
  static bool close(std::unique_ptr<Endpoint> endpoint) { return endpoint->withdraw(); }

  const std::vector<uint8_t>& address() const;
  // The IP address of its first NIC; empty if the provider's addresses are no IP addresses.
  std::string ip() const;
  // "tcp;ofi_rxm on eth0 (192.0.2.2), eth1 (192.0.2.18)"
  const std::string& rails_text() const;
  // The same with the version and the path of libfabric.
  const std::string& description() const;
  // Its NICs, with what tells each from another one: hardware address and rate where they are known.
  const std::string& links() const;
  size_t rails() const;
  size_t max_message() const;
  Transfer transfer() const;
  // True: a message is taken after the chunks written before it to the same peer. False: in any order;
  // a chunk is in the receiver's memory once its sending has completed.
  bool orders_messages() const;
  const Counters& counters() const;

  // Equal addresses give the same Peer, until it is lost: then a new one. Connects on first use. Both sides of a region must have
  // added each other before it is opened: EFA drops writes from an endpoint that has not been
  // added.
  Result<Peer> add_peer(const std::vector<uint8_t>& address);

  // Gives a peer up: messages to it are dropped, and the sink is told. If the peer is added again, it is
  // a new one.
  void give_up(Peer peer, const std::string& why);
  bool is_lost(Peer peer) const;
  bool has_lost_peers() const;

  MessageSender& messages() { return *messages_; }
  ChunkSender& chunk_sender() { return *chunk_sender_; }
  ChunkReceiver& chunk_receiver() { return *chunk_receiver_; }

  // Ok if chunks may be sent from, and regions lie in, memory of `owner` that was lent; else why
  // not.
  Status reaches(const MemoryOwner& owner) const;
  // The network may use [at, at + bytes) until take_back(). The processor never touches that
  // memory: flows there must be chunks. The observer of a region there is told of the last chunk
  // once the owner sees all chunks.
  Status lend(std::byte* at, size_t bytes, const MemoryOwner& owner);
  // If a region there was closed before it was over, the memory has to outlive the endpoint.
  void take_back(std::byte* at);

  // Reaps completions, gives the messages that have arrived to the sink and the chunks to their
  // observers, and tries again the operations that wait. Returns how many events it handled. The
  // sink may call every function of the endpoint and its services but progress().
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
  bool withdraw();
  Result<int> poll_rails(Sink& sink);
  void take(Rail& rail, const Event& event, Sink& sink);
  void handle(Rail& rail, const Event& event, Sink& sink);
  void deliver(const std::byte* data, size_t size, Sink& sink);
  void handle_failure(Rail& rail, const Event& event);
  void count_foreign_write();

  // Memory that libfabric uses comes before the rails: members are destroyed from the last to the
  // first.
  std::unique_ptr<SendBuffers> buffers_;
  std::unique_ptr<PeerTable> peers_;
  std::unique_ptr<MessageSender> messages_;
  std::unique_ptr<ChunkSender> chunk_sender_;
  std::unique_ptr<ChunkReceiver> chunk_receiver_;
  std::unique_ptr<RailSet> rails_;
  bool withdrawn_ = false;
};

}  // namespace smddp::fabric
