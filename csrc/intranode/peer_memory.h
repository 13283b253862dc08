// Access to the arena of a neighbour: maps the segments that the neighbour announces (arena_table.h). It
// knows no blocks, groups or operations. Neighbor (presence.h) calls it. Not thread-safe.
//
// Everything that the neighbour announces is checked: invalid entries lead to nullptr. A pointer from
// find() is valid for as long as the owner keeps the block that it points into. The owner must keep the
// block until every reader is done (the read counts of an outbox tell it). Any later call of find() may
// unmap segments in which the owner has no live block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "intranode/arena_table.h"
#include "intranode/shared.h"

namespace smddp::intranode {

class PeerMemory {
 public:
  // `table_fd`: Arena::table_fd() of the neighbour. Fails if the neighbour announces nothing or its
  // descriptors can't be opened: none of its memory can be found then. Works for this process's own
  // pid as well, with separate mappings.
  static Result<std::unique_ptr<PeerMemory>> open(int pid, int table_fd);

  // The address in this process of [owner_address, owner_address + bytes) of the neighbour's address
  // space, for reads and writes; nullptr if that is not memory of the neighbour's arena. The owner must
  // have made the address known after it allocated the block (arena_table.h). The first call for a
  // segment maps it, which takes some microseconds. The first use of the segment's pages then costs page
  // faults: one fault per sixteen pages for reads, one per page for writes. Later calls look at one
  // shared word and a short list.
  std::byte* find(const std::byte* owner_address, size_t bytes) {
    if (table()->epoch.load(std::memory_order_acquire) != epoch_) refresh();
    auto address = reinterpret_cast<uint64_t>(owner_address);
    if (last_ < known_.size()) {
      const Known& k = known_[last_];
      if (k.mapping.data() != nullptr && within(k, address, bytes)) return at(k, address);
    }
    return look_up(address, bytes);
  }
  // The number of segments that are mapped now.
  size_t mapped() const;

 private:
  struct Known {
    uint64_t base, bytes, device, inode, version;
    int fd;
    uint32_t entry;
    bool refused = false;  // could not be mapped
    Mapping mapping = {};
  };

  static bool within(const Known& k, uint64_t address, size_t bytes) {
    return address >= k.base && address - k.base < k.bytes && bytes <= k.bytes - (address - k.base);
  }
  static std::byte* at(const Known& k, uint64_t address) {
    return k.mapping.data() + (address - k.base);
  }
  const ArenaTable* table() const { return reinterpret_cast<const ArenaTable*>(table_.data()); }
  void refresh();
  std::byte* look_up(uint64_t address, size_t bytes);
  void map(Known& segment) const;

  int pid_ = 0;
  Mapping table_;
  uint64_t epoch_ = UINT64_MAX;  // of the table when `known_` was read
  std::vector<Known> known_;     // by base
  size_t last_ = 0;              // index of the last hit
};

}  // namespace smddp::intranode
