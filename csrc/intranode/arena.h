// Memory that the other ranks of the host can map. The arena allocates blocks in memfd segments and
// announces the segments (arena_table.h). A neighbour, which is another process of a group on this host,
// finds them with PeerMemory (peer_memory.h). The arena knows no group, operation or tensor. Callers: the
// torch allocator, remote peers and fragments.
//
// The segments have no names. The kernel frees a segment when its owner and the last neighbour that
// mapped it have ended, in whatever way they ended. The records of the blocks lie outside of the
// segments, where no neighbour can write.
//
// fork(). A forked child gets what fork() promises for ordinary memory: its own copy of every block
// as it was at that moment. Neither process sees what the other writes later, and a block that the
// parent frees stays readable in the child. Linux has no copy-on-write for shared mappings. A private
// mapping of the memfd would show the child what the parent writes later to pages that the child
// has not yet written. So the child copies the blocks inside fork(), and the parent waits inside fork()
// until the copies are made. Options::fork_copy bounds the copies; the smallest blocks are copied first.
// A block beyond the bound is not accessible in the child: an access ends the child with SIGSEGV, as any
// other content would be wrong. The child's arena allocates nothing more and announces nothing. A child
// made without fork()'s handlers (vfork, posix_spawn, a bare clone) does not have the segments at all.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "intranode/arena_table.h"
#include "intranode/shared.h"

namespace smddp::intranode {

class Arena {
 public:
  struct Options {
    // A further segment is as large as all segments so far together, up to `largest_growth`. A larger
    // request gets a segment of its own.
    // Not measured: it bounds what a process takes that allocates little.
    size_t first_segment = 32 << 20;
    size_t largest_growth = 1 << 30;
    size_t keep = 64 << 20;              // bytes of freed pages kept for later requests, at most
    size_t fork_copy = size_t{1} << 30;  // bytes copied for a forked child, at most
    bool huge_pages = true;              // from the host's pool of huge pages, if it has free ones
  };
  struct Statistics {
    uint64_t in_use = 0;    // bytes of live blocks, rounded up
    uint64_t peak = 0;      // the largest value of in_use so far
    uint64_t blocks = 0;    // live blocks
    uint64_t segments = 0;  // announced segments
    uint64_t reserved =
        0;                 // their address space in bytes; pages are allocated at their first touch
    uint64_t kept = 0;     // bytes of freed pages not yet given back, estimated
    uint64_t huge = 0;     // bytes of `reserved` in huge pages
    uint64_t refused = 0;  // requests for which the arena had no memory
  };

  // The arena of the process, made on first use. It is never destroyed, as its blocks may live longer
  // than any static object.
  static Arena& process();
  // Never fails. If the kernel has no memfd, the arena refuses every request.
  explicit Arena(const Options& options);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // A block with undefined contents, aligned to 64 bytes, or to 4096 if it has 4096 bytes or more.
  // nullptr if there is no memory of this kind, and in a forked child: use ordinary memory then.
  std::byte* allocate(size_t bytes);
  // False if `block` is not a live block of this arena. The caller must ensure that no neighbour
  // still reads or writes the block.
  bool free(void* block);
  // Cheap, takes no lock. False: the address is certainly not in this arena. True: it may be.
  bool may_own(const void* address) const {
    auto a = reinterpret_cast<uintptr_t>(address);
    return a >= lowest_.load(std::memory_order_relaxed) &&
           a < highest_.load(std::memory_order_relaxed);
  }
  // True if neighbours can map all of [address, address + bytes).
  bool contains(const void* address, size_t bytes) const;
  // Gives all pages without live blocks back to the kernel.
  void trim();
  Statistics statistics() const;
  // The descriptor of the table, to be announced to neighbours; -1 if there is no table.
  int table_fd() const;

 private:
  struct Segment {
    std::byte* base;
    size_t bytes;
    FileDescriptor fd;
    uint32_t entry;
    bool huge;
    bool all_copied = true;  // the current fork() copies all of its blocks
  };
  struct Block {
    size_t bytes;
    Segment* segment;
    bool free;
    size_t backed;  // free blocks only: bytes that likely still have pages
  };
  using Blocks = std::map<std::byte*, Block>;

  std::byte* carve(size_t bytes, size_t align);
  bool grow(size_t bytes);
  bool add_segment(size_t bytes, bool huge);
  void release(Segment* segment);
  void give_back_pages(size_t down_to);
  void return_pages(Blocks::iterator block);
  void index(Blocks::iterator block);    // puts it into the free list
  void unindex(Blocks::iterator block);  // takes it out of the free list
  Blocks::iterator merge(Blocks::iterator block);
  void announce(const Segment& segment, bool present);
  ArenaTable* table() const { return reinterpret_cast<ArenaTable*>(table_.mapping.data()); }

  // Handling of fork(), in arena_fork.cc.
  struct Forks;
  void handle_forks(bool handle);
  void plan_copies();         // in the parent, before fork()
  void keep_from_children();  // in the parent, after fork()
  void become_private();      // in the child

  const Options options_;
  mutable std::mutex mutex_;
  Shared table_;
  bool inert_ = false;  // true in a forked child, which has only private copies of the blocks
  std::map<std::byte*, Segment> segments_;
  Blocks blocks_;  // live and free blocks of all segments, without gaps
  std::set<std::pair<size_t, std::byte*>> free_;
  Statistics statistics_;
  std::atomic<uintptr_t> lowest_{UINTPTR_MAX}, highest_{0};  // the range only grows
  std::vector<std::pair<size_t, std::byte*>>
      copies_;  // blocks to copy by the child of the current fork()
};

}  // namespace smddp::intranode
