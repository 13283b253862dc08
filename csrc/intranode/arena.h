// Memory that the other ranks of the host can map: blocks out of memfd segments that the process
// announces (arena_table.h). Neighbours find them with PeerMemory (peer_memory.h).
//
// Nothing has a name: a segment goes when its owner and the last neighbour that mapped it are gone,
// however they end. What is known of the blocks is kept outside of them, where no neighbour can
// write.
//
// fork(). A forked child gets what fork() promises of ordinary memory: its own copy of every block
// as it was at that moment. Neither sees what the other writes later, and a block that the parent
// frees stays readable in the child. Linux has no copy-on-write for shared mappings, and a private
// mapping of the memfd would show the child what the parent writes later to pages that the child
// has not yet written; so the child copies the blocks inside fork(), while the parent waits in it.
// The copies are bounded by Options::fork_copy, smallest blocks first; a block beyond the bound is
// out of the child's reach: touching it ends the child with SIGSEGV, as no other answer would be
// right. The child's arena hands out nothing more and announces nothing. A child made without
// fork()'s handlers (vfork, posix_spawn, a bare clone) does not have the segments at all.
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
    size_t first_segment = 32 << 20;  // each further one as large as all so far together, up to
    size_t largest_growth = 1 << 30;  // this; a larger request gets a segment of its own
    size_t keep = 64 << 20;           // bytes of freed pages that wait for the next request
    size_t fork_copy = size_t{1} << 30;
    bool huge_pages = true;  // from the host's pool of them, where it has any to give
  };
  struct Statistics {
    uint64_t in_use = 0;    // bytes of live blocks, as rounded up
    uint64_t peak = 0;      // the most that in_use ever was
    uint64_t blocks = 0;    // live ones
    uint64_t segments = 0;  // announced
    uint64_t reserved = 0;  // bytes of address space in them; pages come with their first touch
    uint64_t kept = 0;      // bytes of freed pages not yet given back, estimated
    uint64_t huge = 0;      // bytes of `reserved` in huge pages
    uint64_t refused = 0;   // requests that it had no memory for
  };

  // The process's own, made on first use and never destroyed: its blocks may outlive everything.
  static Arena& process();
  // Never fails: where the kernel offers no memfd, the arena has no memory to give.
  explicit Arena(const Options& options);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // A block aligned to 64 bytes, from 4096 bytes on to 4096. What it holds is undefined. nullptr
  // where there is no memory of this kind, and in a forked child: use ordinary memory then.
  std::byte* allocate(size_t bytes);
  // False where `block` is not a live block of this arena. The caller sees to it that no neighbour
  // reads or writes it any more.
  bool free(void* block);
  // Cheap, and without a lock: false means certainly none of this arena's.
  bool may_own(const void* address) const {
    auto a = reinterpret_cast<uintptr_t>(address);
    return a >= lowest_.load(std::memory_order_relaxed) &&
           a < highest_.load(std::memory_order_relaxed);
  }
  // Whether neighbours can reach all of [address, address + bytes).
  bool contains(const void* address, size_t bytes) const;
  // Gives back all pages that no block needs.
  void trim();
  Statistics statistics() const;
  // The number to announce; -1 where there is nothing to.
  int table_fd() const;

 private:
  struct Segment {
    std::byte* base;
    size_t bytes;
    FileDescriptor fd;
    uint32_t entry;
    bool huge;
    bool all_copied = true;  // of its blocks, by the fork under way
  };
  struct Block {
    size_t bytes;
    Segment* segment;
    bool free;
    size_t backed;  // free only: bytes that likely still have pages
  };
  using Blocks = std::map<std::byte*, Block>;

  std::byte* carve(size_t bytes, size_t align);
  bool grow(size_t bytes);
  bool add_segment(size_t bytes, bool huge);
  void release(Segment* segment);
  void give_back_pages(size_t down_to);
  void return_pages(Blocks::iterator block);
  void index(Blocks::iterator block);    // into the free list
  void unindex(Blocks::iterator block);  // out of it
  Blocks::iterator merge(Blocks::iterator block);
  void announce(const Segment& segment, bool present);
  ArenaTable* table() const { return static_cast<ArenaTable*>(table_.mapping.address()); }

  // fork(), in arena_fork.cc.
  struct Forks;
  void heed_forks(bool heed);
  void plan_copies();         // in the parent, before
  void keep_from_children();  // in the parent, after
  void become_private();      // in the child

  const Options options_;
  mutable std::mutex mutex_;
  Shared table_;
  bool inert_ = false;  // a forked child's: what is left are private copies
  std::map<std::byte*, Segment> segments_;
  Blocks blocks_;  // of all segments, without gaps
  std::set<std::pair<size_t, std::byte*>> free_;
  Statistics statistics_;
  std::atomic<uintptr_t> lowest_{UINTPTR_MAX}, highest_{0};  // only ever widen
  std::vector<std::pair<size_t, std::byte*>> copies_;        // for the child of the fork under way
};

}  // namespace smddp::intranode
