// The rails of one endpoint: which rail a message or a chunk takes, and the file descriptor to sleep
// on. Knows nothing of lost peers and of operations that wait for room. Called by the classes of
// this folder only.
//
// Which rails meet: rail i of n here and rail i mod m of a peer's m. So all rails of the side that
// has more are used, and each address vector holds the addresses that its rail sends to and those
// that may write to its rail.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/file_descriptor.h"
#include "transport/ofi/address.h"
#include "transport/ofi/rail.h"
#include "transport/ofi/types.h"
#include "transport/rail_balance.h"

namespace smddp::ofi {

// A peer in the address vectors of this endpoint's rails.
struct PeerAddress {
  std::array<fi_addr_t, kMaxRails> by_rail;  // of this endpoint
  size_t rails = 0;                          // of the peer
};

class RailSet {
 public:
  // `transfer`: Options::transfer. `wait`: as of Rail::open.
  static Result<std::unique_ptr<RailSet>> open(const Library& library, const RailChoices& choices,
                                               const std::string& transfer, fi_wait_obj wait,
                                               Counters* counters);

  size_t size() const { return rails_.size(); }
  Rail& operator[](size_t rail) { return *rails_[rail]; }
  const transport::Facts& facts() const { return facts_; }
  bool writes() const { return facts_.writes; }
  size_t max_message() const { return facts_.max_message; }
  Counters& counters() { return *counters_; }
  // Why a request was refused with `rc` on `rail`: "`what`: reason (rail)", with the code of code_of().
  Status refusal(const char* what, ssize_t rc, const Rail& rail) const;

  // The peer's published address in this endpoint's terms; kInvalid if it can't be used.
  Result<PublishedAddress> unpack(const std::vector<uint8_t>& published) const;
  Result<PeerAddress> insert(const PublishedAddress& peer);

  // Starts a message, and counts it: 0, -FI_EAGAIN, or the error that refused it.
  ssize_t send(Request* request, const PeerAddress& to, std::span<const std::byte> data);
  // The rail that a chunk takes: any, as each rail of the receiver has a key in the grant.
  Rail& rail_of_chunk(uint32_t index) { return *rails_[balance_.choose_for_chunk(index)]; }
  // Starts chunk `index` of a region over `rail`, and counts it. `descriptor`: as of Rail::write().
  ssize_t write(Rail& rail, Request* request, const PeerAddress& to, const wire::Grant& grant,
                uint32_t index, std::span<const std::byte> data, void* descriptor);
  // For each message and chunk that was started and has completed.
  void finished(const Request& request, size_t bytes) { balance_.finished(request.rail, bytes); }

  // Memory of a device; see Transport.
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
  RailSet(const Library& library, Counters* counters) : library_(library), counters_(counters) {}
  Status set_up(const RailChoices& choices, const std::string& transfer, fi_wait_obj wait);
  Status limit_sizes(const RailChoices& choices);
  Status open_wait_fd();
  // What came of a start: `rc` as of Rail::send. Adds to the counters of its kind.
  void count(size_t rail, size_t bytes, ssize_t rc, uint64_t* starts, uint64_t* started_bytes);

  Library library_;
  Counters* counters_;
  std::vector<std::unique_ptr<Rail>> rails_;
  RailBalance balance_;
  transport::Facts facts_;
  FileDescriptor all_wait_fds_;  // of several rails: an epoll instance
  int wait_fd_ = -1;
};

}  // namespace smddp::ofi
