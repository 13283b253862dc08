// The process's endpoint: a transport over libfabric, over one NIC or several. Owns one class per job (messages,
// chunks to send, regions) over the rails that they share, and gives each completion to the class that has started
// the request. open.h opens it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/ofi/open.h"
#include "transport/ofi/silent_connections.h"
#include "transport/ofi/types.h"

namespace smddp::ofi {

class ChunkSender;
class MessageSender;
class PeerTable;
class Rail;
class RailSet;
class Regions;
class SendBuffers;
struct Completion;

class Endpoint final : public transport::Transport {
 public:
  static Result<std::unique_ptr<Endpoint>> open(const Options& options);
  ~Endpoint() override;

  const Counters& counters() const override { return counters_; }
  Result<Peer> add_peer(const std::vector<uint8_t>& address) override;
  void give_up(Peer peer, const std::string& why) override;
  bool is_lost(Peer peer) const override;
  bool has_lost_peers() const override;

  // Of each kind of buffers a peer may hold as many as are still free: one peer that stalls takes at most half, k
  // peers leave 1/(k+1).
  MessageBuffer* acquire(Peer to, bool control) override;
  void post(MessageBuffer* buffer, size_t size) override;

  bool open_region(Peer from, std::byte* memory, size_t bytes, uint32_t* region,
                   wire::Grant* grant) override;
  size_t arrived(uint32_t region) const override;
  bool visible(uint32_t region) override;
  void close_region(uint32_t region, bool abandoned) override;
  bool write(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data, size_t bytes,
             uint32_t* pending) override;
  void write(MessageBuffer* buffer, const wire::Grant& grant, uint32_t index, size_t bytes,
             uint32_t* pending) override;

  Status reaches(const MemoryOwner& owner) const override;
  Status lend(std::byte* at, size_t bytes, const MemoryOwner& owner) override;
  void take_back(std::byte* at) override;

  Result<int> poll(Sink& sink) override;
  bool idle() const override;
  int wait_fd() const override;
  int sleep_limit_ms() override;
  bool close() override;

 private:
  Endpoint();
  Status open_rails(std::unique_ptr<RailSet> rails);
  void take(Rail& rail, const Completion& completion, Sink& sink);
  void handle(Rail& rail, const Completion& completion, Sink& sink);
  void handle_failure(Rail& rail, const Completion& completion);
  void deliver(const std::byte* data, size_t size, Sink& sink);

  Counters counters_;
  // Memory that libfabric uses comes before the rails: members are destroyed from the last to the
  // first.
  std::unique_ptr<SendBuffers> buffers_;
  std::unique_ptr<PeerTable> peers_;
  std::unique_ptr<MessageSender> messages_;
  std::unique_ptr<ChunkSender> chunks_;
  std::unique_ptr<Regions> regions_;
  std::unique_ptr<RailSet> rails_;
  SilentConnections silent_;
  bool closed_ = false;
};

}  // namespace smddp::ofi
