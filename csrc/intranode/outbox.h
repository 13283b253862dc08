// A rank's outbox: a ring of pieces in a shared segment, written by its owner, read by every other
// rank of the node and group. A piece carries its bytes inline, or the addresses to read them from.
//
// Memory ordering: the owner fills a slot, then stores published (release); a reader loads
// published (acquire), then reads the slot. A reader that is done with a piece stores its count
// (release); the owner loads all counts (acquire) before it reuses the slot, and before it lets go
// of memory whose address it had put there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "common/signature.h"
#include "common/status.h"
#include "intranode/presence.h"
#include "intranode/slot_writes.h"

namespace smddp::intranode {

// 2 MiB together: by the time a slot is written again, its lines have left the second-level caches of
// readers and writer. To take them from another core's cache costs more than from the shared one.
inline constexpr size_t kSlots = 64;
inline constexpr size_t kSlotBytes = 32 << 10;

// A run of bytes in the owner's address space.
struct Extent {
  std::byte* address;
  size_t bytes;
};
inline constexpr size_t kSlotExtents = kSlotBytes / sizeof(Extent);

struct Piece {
  uint64_t seq = 0;     // the round it belongs to
  Signature signature;  // what its owner believes that round to be
  uint64_t offset = 0;  // into the round's part of the shard or block
  uint64_t bytes = 0;
  uint32_t shard = 0;    // whose shard (AllGather) or block (ReduceScatter)
  uint32_t extents = 0;  // > 0: the slot holds this many extents instead of the bytes
  uint32_t last = 0;     // 1: the owner's last piece of this round
  uint32_t reserved = 0;
};

struct alignas(128) SlotHead {
  std::atomic<uint64_t> published;  // index of the piece in it, plus one
  Piece piece;
};

struct alignas(128) ReadCount {
  std::atomic<uint64_t> pieces;
};

struct OutboxHead {
  JobKey key;         // of the owner's info
  uint32_t capacity;  // readers that the layout has room for
  std::atomic<uint32_t>
      attached;  // readers that have mapped this outbox and judged single-copy reads
  std::atomic<uint32_t> denied;   // of those, how many may not read the owner's memory
  std::atomic<uint32_t> aborted;  // 1: `reason` says why the owner gave the group up,
  uint64_t aborted_from;          // and this which round it gave up first
  uint64_t probe_address;         // a word in the owner's private memory, and what it holds
  uint64_t probe_value;
  char reason[kReasonBytes];
};

// Owner's side.
class Outbox {
 public:
  Outbox();
  // Room for `capacity` readers. `key` tells the openers that this is the outbox they were told of.
  static Result<std::unique_ptr<Outbox>> create(const JobKey& key, int capacity);
  // How many readers there will be, once that is known.
  void expect(int readers) { readers_ = static_cast<uint32_t>(readers); }

  int fd() const { return shared_.fd.get(); }
  // Closes the descriptor once every reader has mapped the segment; it can't be opened after that.
  bool all_attached();
  // Sleeps until the last reader attaches, at most `timeout_ns`; may return early.
  void wait_attached(uint64_t timeout_ns) const;
  bool any_denied() const;

  // Where the next piece's bytes or extents go, or nullptr while the oldest slot is still being
  // read.
  std::byte* next();
  // Calls write(streaming), which writes `bytes` bytes into that slot, `streaming` as kernels::copy().
  template <class Write>
  void fill(size_t bytes, Write&& write) {
    writes_.run(bytes, std::forward<Write>(write));
  }
  void publish(const Piece& piece);
  uint64_t published() const { return published_; }
  // Pieces that every reader is done with.
  uint64_t read_by_all();
  uint64_t read_by(int reader) const;
  // Says that rounds from `first` on, and the group with them, are given up. Earlier ones have all
  // that this rank had to push for them.
  void abort(const std::string& reason, uint64_t first);

 private:
  OutboxHead* head() const;
  Shared shared_;
  uint32_t capacity_ = 0, readers_ = 0;
  uint64_t published_ = 0;
  uint64_t read_ = 0;  // what read_by_all() last said
  uint64_t probe_ = 0;
  SlotWrites writes_;
};

// Reader's side of one neighbour's outbox.
class Inbox {
 public:
  // `reader` is this rank's position among the outbox's `readers` readers. Judges single-copy reads
  // from the owner.
  static Result<std::unique_ptr<Inbox>> open(int pid, int fd, const JobKey& key, int reader,
                                             int readers, bool allow_single_copy);

  // The oldest piece not yet popped, or nullptr.
  const Piece* head() const;
  const std::byte* bytes() const;  // of head()
  const Extent* extents() const;   // of head(); addresses in the owner's space
  void pop();
  const char* aborted() const;    // reason, or nullptr
  uint64_t aborted_from() const;  // of what was aborted(), the first round
  // What the readers of this outbox, all `readers` of them, found: false while some have yet to
  // attach.
  bool all_attached(int readers) const;
  void wait_attached(int readers, uint64_t timeout_ns) const;
  bool any_denied() const;
  int pid() const { return pid_; }

 private:
  SlotHead* slot() const;
  Mapping mapping_;
  int pid_ = 0;
  uint32_t reader_ = 0;
  uint64_t read_ = 0;
};

// Copies `bytes` bytes that start `offset` bytes into the extents `from` of process `pid` to the
// extents `to`, which must hold as much. One system call per IOV_MAX runs.
Status single_copy_read(int pid, const Extent* from, size_t from_count, size_t offset, size_t bytes,
                        const Extent* to, size_t to_count);

// Whether that costs less here than a copy into the segment and one out of it. Measured once per
// process, in about a millisecond.
bool single_copy_pays();

}  // namespace smddp::intranode
