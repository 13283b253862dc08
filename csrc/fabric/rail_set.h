// The Endpoint over a set of rails. Peers, the FIFO of each, buffers and regions are the set's; a
// message or a chunk takes one rail.
//
// Which rails meet: rail i of n here and rail i mod m of a peer's m. So all rails of the side that has
// more are used, and each address vector holds what its rail sends to and what may write to it.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/file_descriptor.h"
#include "fabric/buffers.h"
#include "fabric/endpoint.h"
#include "fabric/rail.h"
#include "fabric/rail_balance.h"
#include "fabric/receive_region.h"

namespace smddp::fabric {

class RailSet final : public Endpoint {
 public:
  static Result<std::unique_ptr<RailSet>> open(const Library& library, const RailChoices& choices,
                                               const std::string& transfer, fi_wait_obj wait);

  ~RailSet() override;

  const std::vector<uint8_t>& address() const override { return address_; }
  const std::string& description() const override { return description_; }
  size_t max_message() const override { return max_message_; }
  const Counters& counters() const override { return counters_; }
  Result<Peer> add_peer(const std::vector<uint8_t>& address) override;
  SendBuffer* acquire(Peer to, bool control) override;
  void post(SendBuffer* buffer, size_t size) override;
  void release(SendBuffer* buffer) override;
  Transfer transfer() const override { return transfer_; }
  bool open_region(Peer from, std::byte* memory, size_t bytes, size_t chunk_bytes,
                   ChunkObserver* observer, wire::Grant* grant) override;
  void close_region(uint32_t region, bool complete) override;
  bool send_chunk(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data,
                  size_t bytes, uint32_t* pending) override;
  void post_chunk(SendBuffer* buffer, const wire::Grant& grant, uint32_t index,
                  size_t bytes) override;
  Status reaches(const MemoryOwner& owner) const override;
  Status lend(std::byte* at, size_t bytes, const MemoryOwner& owner) override;
  void take_back(std::byte* at) override;
  Result<int> progress(Sink& sink) override;
  bool idle() const override { return posted_ == 0; }
  int wait_fd() const override { return wait_fd_; }
  bool may_sleep() override;
  int sleep_limit_ms() const override;

 private:
  struct PeerState {
    std::array<fi_addr_t, wire::kMaxRails> addresses;  // by our rail
    size_t rails = 0;                                  // the peer's
    bool takes_chunks = false;                         // its chunks travel as ours do
    SlotQueue<SendSlot> waiting;
    size_t held[2] = {0, 0};  // buffers acquired and not back yet: data, control
    size_t chunks = 0;        // ChunkSendSlots with libfabric
    bool lost = false;
    bool listed = false;  // in stalled_
  };
  struct Loss {
    Peer peer;
    Status why;
  };

  explicit RailSet(const Library& library) : library_(library) {}
  Status set_up(const RailChoices& choices, const std::string& transfer, fi_wait_obj wait);
  Status open_wait_fd();
  Status cut_sends();

  void enqueue(SendSlot* slot);
  // 0, -FI_EAGAIN, or 0 with the peer marked lost where libfabric refused for good.
  int try_send(SendSlot* slot);
  size_t rail_of_chunk(const PeerState& peer, uint32_t index);
  ssize_t start_chunk(Slot* slot, const PeerState& peer, size_t rail, const wire::Grant& grant,
                      uint32_t index, const std::byte* data, size_t bytes, void* descriptor);
  void retry_stalled(int& handled);
  void take_back(SendSlot* slot);
  Status prepare_flushes();
  void finish(SendSlot* slot);       // that had been with libfabric
  void finish(ChunkSendSlot* slot);  // likewise
  void lose(Peer peer, const std::string& why);

  bool register_region(ReceiveRegion& region);
  uint64_t remote_address(const ReceiveRegion& region) const;
  void expect_chunks(ReceiveRegion& region);
  void forget_expected(ChunkReceiveSlot* slot);
  void chunk_arrived(uint32_t region, uint32_t index);
  void chunk_received(ChunkReceiveSlot* slot, size_t bytes);
  void flush(ReceiveRegion& region);
  ReceiveRegion* end_flush(FlushSlot* slot);  // nullptr where the region has been closed
  void flushed(FlushSlot* slot);

  void handle(Rail& rail, const Event& event, Sink& sink);
  void handle_failure(Rail& rail, const Event& event);

  // Buffers before the rails that use them; members are destroyed from the last to the first.
  Library library_;
  Slab slab_;
  std::vector<SendSlot> sends_;
  std::vector<ChunkSendSlot> chunk_sends_;
  std::vector<ChunkReceiveSlot> chunk_receives_;
  Slab flush_slab_;  // of nobody's interest
  std::vector<FlushSlot> flushes_;
  std::vector<std::unique_ptr<Rail>> rails_;

  std::vector<uint8_t> address_;
  std::string description_;
  size_t max_message_ = 0;
  size_t max_chunk_ = 0;
  Transfer transfer_ = Transfer::kMessages;
  bool virtual_addresses_ = false;  // of remote memory; otherwise offsets
  FileDescriptor all_wait_fds_;     // of several rails: an epoll instance
  int wait_fd_ = -1;
  Counters counters_;

  SlotQueue<SendSlot> free_[2];  // data, control
  SlotQueue<ChunkSendSlot> free_chunk_sends_;
  SlotQueue<ChunkReceiveSlot> free_chunk_receives_;
  SlotQueue<FlushSlot> free_flushes_;
  std::vector<fi_addr_t> own_addresses_;            // by rail: its own; empty before memory is lent
  std::vector<Registration*> flush_registrations_;  // by rail; nullptr: none needed
  ReceiveRegionTable regions_;
  std::vector<uint32_t> short_regions_;  // numbers of those that miss posted receives
  std::vector<uint32_t> unflushed_;      // numbers of those with reads to begin
  RailBalance balance_;
  size_t posted_ = 0;            // messages and chunks with libfabric or in a FIFO
  std::deque<PeerState> peers_;  // grows during callbacks; elements stay where they are
  std::unordered_map<std::string, Peer> known_;
  std::vector<Peer> stalled_;  // peers whose FIFO is not empty
  std::vector<Loss> losses_;   // to be told at the next progress()
};

}  // namespace smddp::fabric
