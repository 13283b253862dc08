// The other ranks of this host in a group: this rank's outbox, which they read, their outboxes, which
// this rank reads, and the pipes that wake them. Must not know operations, fragments or the
// network. The group's fragments and its FailureDetector call it, under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/types.h"
#include "intranode/outbox.h"

namespace smddp {

class LocalPeers {
 public:
  LocalPeers() = default;  // of a rank that is alone on its host
  // `outbox`: this rank's own.
  explicit LocalPeers(std::unique_ptr<intranode::Outbox> outbox) : outbox_(std::move(outbox)) {}
  // In the order of their local index.
  void add(Rank rank, std::unique_ptr<intranode::Inbox> inbox,
           std::shared_ptr<intranode::Neighbor> neighbor);

  int count() const { return static_cast<int>(inboxes_.size()); }
  Rank rank(int i) const { return ranks_[static_cast<size_t>(i)]; }
  intranode::Outbox& outbox() { return *outbox_; }
  const intranode::Outbox& outbox() const { return *outbox_; }
  intranode::Inbox& inbox(int i) { return *inboxes_[static_cast<size_t>(i)]; }
  const intranode::Inbox& inbox(int i) const { return *inboxes_[static_cast<size_t>(i)]; }
  intranode::Neighbor& neighbor(int i) { return *neighbors_[static_cast<size_t>(i)]; }

  // True once every rank of this host has mapped every outbox of it, and has judged whether it may
  // read the owner's memory.
  bool all_attached();
  // After that: whether every rank of this host may read the memory of every other. The ranks of a host
  // must decide alike, so each looks at every verdict, not only at its own.
  bool may_read_memory() const;

  void push(intranode::Lane lane, const intranode::Piece& piece);
  void pop(intranode::Lane lane, int i);
  // Bytes of peer i's oldest piece of the lane, from `offset` on, that this rank can read in place, and where they
  // lie: in the peer's slot, or in memory that the peer shares. 0: they need a single-copy read.
  size_t reach(intranode::Lane lane, int i, size_t offset, const std::byte** at);
  // Tells the peers that this rank gives up the group from fragment `from` on.
  void abort(const std::string& reason, uint64_t from,
             intranode::GaveUp how = intranode::GaveUp::kBroken);
  // Wakes the peers that sleep and have something to look at since the last call.
  void wake();

 private:
  std::vector<Rank> ranks_;
  std::unique_ptr<intranode::Outbox> outbox_;
  std::vector<std::unique_ptr<intranode::Inbox>> inboxes_;
  std::vector<std::shared_ptr<intranode::Neighbor>> neighbors_;
  bool pushed_since_wake_ = false;
  std::vector<bool> popped_since_wake_;
};

}  // namespace smddp
