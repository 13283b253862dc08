// The table by which a process announces the segments of its arena, in a memfd of its own whose
// number stands in the PresencePage. One thread at a time writes (under the arena's lock); any
// neighbour reads, through a read-only mapping.
//
// Memory ordering. Each entry is a seqlock: the owner makes `version` odd, passes a release fence,
// stores the fields, and stores the next even version (release). A reader loads an even version
// (acquire), the fields, passes an acquire fence and loads the version again: had it seen a field
// of a later change, the two fences would make it see that change's odd version as well. After each
// change the owner adds one to `epoch` (release); a reader that finds the epoch it knows (acquire)
// knows the whole table. An owner that announces a segment and then publishes an address in it
// (outbox, release) is sure to be understood: the reader that acquired the address also sees the
// epoch from before.
//
// Descriptors: an entry is retracted before its descriptor is closed, and tells the memfd's inode,
// so a reader that opened a number that meanwhile means something else notices.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace smddp::intranode {

inline constexpr uint64_t kArenaMagic = 0x736d646470617231;
inline constexpr uint32_t kArenaEntries = 256;

struct ArenaEntry {
  std::atomic<uint64_t> version;  // odd: being changed; 0: never used
  std::atomic<uint64_t> base;     // in the owner's address space
  std::atomic<uint64_t> bytes;    // 0: no segment
  std::atomic<uint64_t> device, inode;
  std::atomic<uint64_t> fd;
};

struct ArenaTable {
  uint64_t magic;  // written once, before the table is announced
  std::atomic<uint64_t> epoch;
  std::atomic<uint32_t> used;  // no entry from here on was ever used
  ArenaEntry entries[kArenaEntries];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace smddp::intranode
