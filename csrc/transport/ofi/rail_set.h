// The rails of one endpoint: which rail a message or a chunk takes, and the file descriptor to sleep
// on. Knows nothing of lost peers and of operations that wait for room. Called by the classes of
// this room only.
//
// Which rails meet: rail i of n here and rail i mod m of a peer's m. So all rails of the side that
// has more are used, and each address vector holds the addresses that its rail sends to and those
// that may write to its rail.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "common/file_descriptor.h"
#include "transport/ofi/endpoint.h"
#include "transport/ofi/address.h"
#include "transport/ofi/rail.h"
#include "transport/ofi/rail_balance.h"

namespace smddp::fabric {

static_assert(wire::kMaxRails == kMaxRails);

// A peer in the address vectors of this endpoint's rails.
struct PeerAddress {
  std::array<fi_addr_t, kMaxRails> by_rail;  // of this endpoint
  size_t rails = 0;                          // of the peer
};

class RailSet {
 public:
  // `transfer`: Options::transfer. `wait`: as of Rail::open.
  static Result<std::unique_ptr<RailSet>> open(const Library& library, const RailChoices& choices,
                                               const std::string& transfer, fi_wait_obj wait);

  size_t size() const { return rails_.size(); }
  Rail& operator[](size_t rail) { return *rails_[rail]; }
  // What peers need to reach this endpoint.
  const std::vector<uint8_t>& address() const { return address_; }
  const std::string& rails_text() const { return rails_text_; }
  const std::string& description() const { return description_; }
  const std::string& links() const { return links_; }
  Transfer transfer() const { return transfer_; }
  // A message is processed by its receiver after the chunks that were started before it.
  bool orders_messages() const { return rails_.size() == 1 && rails_[0]->orders_messages(); }
  size_t max_message() const { return max_message_; }
  size_t max_chunk() const { return max_chunk_; }
  Counters& counters() { return counters_; }
  // Why operation `rc` on `rail` was refused: "`what`: reason (rail)", with the code of code_of().
  Status refusal(const char* what, ssize_t rc, const Rail& rail) const;

  // The peer's published address in this endpoint's terms; kInvalid if it can't be used.
  Result<PublishedAddress> unpack(const std::vector<uint8_t>& published) const;
  Result<PeerAddress> insert(const PublishedAddress& peer);

  // Starts a message, and counts it: 0, -FI_EAGAIN, or the error that refused it.
  ssize_t send(Slot* slot, const PeerAddress& to, const std::byte* data, size_t bytes);
  // The rail that a chunk has to take. on_chunk_started() counts what came of it, `rc`.
  size_t rail_of_chunk(const PeerAddress& to, uint32_t index) const;
  void on_chunk_started(const Rail& rail, size_t bytes, ssize_t rc);
  // For each message and chunk that was started and has completed.
  void finished(const Slot& slot, size_t bytes) { balance_.finished(slot.rail, bytes); }

  // Memory of a device; see Endpoint.
  Status reaches(const MemoryOwner& owner) const;
  void lend(const std::byte* at, size_t bytes, const MemoryOwner& owner);
  void take_back(const std::byte* at);

  // Takes the receives of all rails back, so that they may be closed. False: some rails must stay
  // open for the rest of the process, with all memory that libfabric may still use for them. They
  // are no longer in the set.
  bool withdraw();

  int wait_fd() const { return wait_fd_; }
  bool may_sleep();
  bool loses_wakeups() const;

 private:
  explicit RailSet(const Library& library) : library_(library) {}
  Status set_up(const RailChoices& choices, const std::string& transfer, fi_wait_obj wait);
  Status limit_sizes(const RailChoices& choices);
  Status open_wait_fd();
  // What came of a start: `rc` as of Rail::send. Adds to the counters of its kind.
  void count(size_t rail, size_t bytes, ssize_t rc, uint64_t* starts, uint64_t* started_bytes);

  Library library_;
  Counters counters_;
  std::vector<std::unique_ptr<Rail>> rails_;
  RailBalance balance_;
  Transfer transfer_ = Transfer::kMessages;
  std::vector<uint8_t> address_;
  std::string rails_text_, description_, links_;
  size_t max_message_ = 0;
  size_t max_chunk_ = 0;
  FileDescriptor all_wait_fds_;  // of several rails: an epoll instance
  int wait_fd_ = -1;
};

}  // namespace smddp::fabric
