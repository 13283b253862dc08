// The layout of the table in which a process announces the segments of its arena. The table lies in a
// memfd of its own, whose descriptor number is in the PresencePage. It knows nothing of blocks or their
// contents. Arena writes it, one thread at a time (under the arena's lock). PeerMemory in any neighbour
// reads it, through a read-only mapping.
//
// Memory ordering. Each entry is a seqlock. The owner makes `version` odd, passes a release fence,
// stores the fields, and stores the next even version (release). A reader loads an even version
// (acquire) and the fields, passes an acquire fence and loads the version again. If it had seen a field
// of a later change, the two fences would make it see that change's odd version as well. After each
// change the owner adds one to `epoch` (release). A reader that finds the epoch that it knows (acquire)
// knows the whole table. If an owner announces a segment and then publishes an address in it (outbox,
// release), a reader that acquires the address also sees the epoch of the announcement.
//
// Descriptors. The owner retracts an entry before it closes the entry's descriptor, and the entry has
// the memfd's inode. So a reader can detect that the descriptor number now means another file.
#pragma once

#include <atomic>
#include <cstdint>

namespace smddp::intranode {

inline constexpr uint64_t kArenaMagic = 0x736d646470617231;
inline constexpr uint32_t kArenaEntries = 256;

struct ArenaEntry {
  std::atomic<uint64_t> version;  // odd: a change is under way; 0: never used
  std::atomic<uint64_t> base;     // in the owner's address space
  std::atomic<uint64_t> bytes;    // 0: no segment
  std::atomic<uint64_t> device, inode;
  std::atomic<uint64_t> fd;
};

struct ArenaTable {
  uint64_t magic;  // written once, before the table is announced
  std::atomic<uint64_t> epoch;
  std::atomic<uint32_t> used;  // entries from this index on have never been used
  ArenaEntry entries[kArenaEntries];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace smddp::intranode
