// A rank's outbox: rings of pieces in a shared segment, one per lane. Its owner writes them; every other rank of
// the group on the host reads them, through an Inbox. A piece contains its bytes, or the addresses to read them
// from. The file does not know what the bytes mean, nor when a piece is due. Group makes outboxes and
// inboxes; the fragments inside a host write and read them.
//
// Memory ordering: the owner fills a slot, then stores `published` (release). A reader loads
// `published` (acquire), then reads the slot. A reader that is done with a piece stores its count
// (release). The owner loads all counts (acquire) before it reuses the slot, and before it frees
// memory whose address it had put there.
#pragma once

#include <array>
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

// Gathers and sums have a ring each, so that pieces of the ones pass those of the others. The pieces of a lane keep
// their order.
enum class Lane : uint8_t { kSums, kGathers };
inline constexpr size_t kLanes = 2;
inline Lane other(Lane lane) { return lane == Lane::kSums ? Lane::kGathers : Lane::kSums; }

// All slots of a lane together have 2 MiB: when a slot is written again, its lines have left the second-level
// caches of readers and writer. A line from another core's cache costs more than one from the shared
// cache. With 16 slots 64 KiB took 5.5 us for 2.9; 128 slots and larger slots brought nothing (2026-11-21, AMD EPYC).
inline constexpr size_t kSlots = 64;
inline constexpr size_t kSlotBytes = 32 << 10;

// A run of bytes in the owner's address space.
struct Extent {
  std::byte* address;
  size_t bytes;
};
inline constexpr size_t kSlotExtents = kSlotBytes / sizeof(Extent);

struct Piece {
  uint64_t seq = 0;     // the fragment that it belongs to
  Signature signature;  // the operation of that fragment, according to the owner
  uint64_t offset = 0;  // in the fragment's part of the shard or block
  uint64_t bytes = 0;
  uint32_t shard = 0;    // whose shard (AllGather) or block (ReduceScatter)
  uint32_t extents = 0;  // > 0: the slot holds this many extents instead of the bytes
  uint32_t last = 0;     // 1: the owner's last piece of this fragment
  uint32_t reserved = 0;
};

struct alignas(128) SlotHead {
  std::atomic<uint64_t> published;  // index of the piece in the slot, plus one
  Piece piece;
};

struct alignas(128) ReadCount {
  std::atomic<uint64_t> pieces;
};

// A rank that has destroyed a group that worked is missed only by those that still need it.
enum class GaveUp : uint32_t { kNo, kBroken, kDestroyed };

struct OutboxHead {
  JobKey key;         // from the owner's RankInfo
  uint32_t capacity;  // readers that the layout has room for
  // Readers that have mapped this outbox and have tested single-copy reads.
  std::atomic<uint32_t> attached;
  std::atomic<uint32_t> denied;  // the attached readers that can't read the owner's memory
  std::atomic<GaveUp> aborted;   // whether the owner did; `reason` says why
  uint64_t aborted_from;         // the first fragment that the owner gave up
  uint64_t probe_address;        // a word in the owner's private memory
  uint64_t probe_value;          // the contents of that word
  uint64_t knows;                // of the host, as a word that only the layer above reads
  char reason[kReasonBytes];
};

// The owner's side.
class Outbox {
 public:
  Outbox();
  // Room for `capacity` readers. By `key` a reader checks that it opened the right outbox. `knows`: a word for them.
  static Result<std::unique_ptr<Outbox>> create(const JobKey& key, int capacity,
                                                uint64_t knows = 0);
  // Sets the number of readers, once it is known.
  void expect(int readers) { readers_ = static_cast<uint32_t>(readers); }

  int fd() const { return shared_.fd.get(); }
  // True if every reader has mapped the segment. The descriptor is closed then, so that the segment
  // can't be opened any more.
  bool all_attached();
  // Sleeps until the last reader attaches, for at most `timeout_ns`. May return early.
  void wait_attached(uint64_t timeout_ns) const;
  bool any_denied() const;

  // The slot for the bytes or extents of the lane's next piece; nullptr while the oldest slot is still being
  // read.
  std::byte* next(Lane lane);
  // Calls write(streaming), which writes `bytes` bytes into that slot. `streaming` means the same as for
  // kernels::copy().
  template <class Write>
  void fill(size_t bytes, Write&& write) {
    writes_.run(bytes, std::forward<Write>(write));
  }
  void publish(Lane lane, const Piece& piece);
  uint64_t published(Lane lane) const { return of(lane).published; }
  // The number of the lane's pieces that every reader is done with.
  uint64_t read_by_all(Lane lane);
  uint64_t read_by(Lane lane, int reader) const;
  // Tells the readers that this rank gives up the fragments from `first` on, and the group. This rank has
  // already pushed all of its pieces of earlier fragments.
  void abort(const std::string& reason, uint64_t first, GaveUp how = GaveUp::kBroken);

 private:
  struct Ring {
    uint64_t published = 0;
    uint64_t read = 0;  // the last result of read_by_all()
  };
  OutboxHead* head() const;
  Ring& of(Lane lane) { return rings_[static_cast<size_t>(lane)]; }
  const Ring& of(Lane lane) const { return rings_[static_cast<size_t>(lane)]; }
  Shared shared_;
  uint32_t capacity_ = 0, readers_ = 0;
  std::array<Ring, kLanes> rings_;
  uint64_t probe_ = 0;
  SlotWrites writes_;
};

// The reader's side of one neighbour's outbox.
class Inbox {
 public:
  // `reader` is this rank's position among the `readers` readers of the outbox. Tests whether this
  // process can read the owner's memory (single-copy reads), and tells the owner.
  static Result<std::unique_ptr<Inbox>> open(int pid, int fd, const JobKey& key, int reader,
                                             int readers, bool allow_single_copy);

  // The lane's oldest piece not yet popped, or nullptr. A copy: what the owner writes later does not change it.
  const Piece* head(Lane lane) const;
  const std::byte* bytes(Lane lane) const;  // of head()
  const Extent* extents(Lane lane) const;   // of head(); addresses in the owner's space
  void pop(Lane lane);
  // The owner's reason, or nullptr. A copy that ends, whatever the owner has written.
  const char* aborted() const;
  bool destroyed() const;         // if aborted()
  uint64_t aborted_from() const;  // if aborted(): the first fragment that the owner gave up
  // True if the owner gave up fragment `seq`. Everything read before this call was read before the owner
  // got its memory back, if it returns false.
  bool gave_up(uint64_t seq) const;
  // True if all `readers` readers of this outbox have attached. any_denied() is final then.
  bool all_attached(int readers) const;
  void wait_attached(int readers, uint64_t timeout_ns) const;
  bool any_denied() const;
  int pid() const { return pid_; }
  uint64_t owner_knows() const;  // the owner's word

 private:
  struct Ring {
    uint64_t read = 0;
    uint64_t copied = 0;  // the index, plus one, of the piece in `piece`
    Piece piece;
  };
  Ring& of(Lane lane) const { return rings_[static_cast<size_t>(lane)]; }
  Mapping mapping_;
  int pid_ = 0;
  uint32_t reader_ = 0;
  uint32_t capacity_ = 0;  // of the layout, as checked by open()
  mutable std::array<Ring, kLanes> rings_;
  mutable char reason_[kReasonBytes] = {};
};

// Copies `bytes` bytes, from byte `offset` of the extents `from` of process `pid` on, to the extents
// `to`, which must have room for them. One system call per 64 runs (kRuns in single_copy.cc).
Status single_copy_read(int pid, const Extent* from, size_t from_count, size_t offset, size_t bytes,
                        const Extent* to, size_t to_count);

}  // namespace smddp::intranode
