// A neighbour's arena, as this process reaches it. Not thread-safe.
//
// Nothing that the neighbour announces is taken on trust: garbage leads to nullptr. A pointer from
// find() is good for as long as the owner keeps the block that it points into; the owner must keep
// it until every reader is done (an outbox's read counts say so). Segments in which the owner has
// no live block may be unmapped by any later call to find().
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
  // `table_fd`: Arena::table_fd() of the neighbour. Fails where the neighbour announces nothing or its
  // descriptors can't be opened: nothing of it can be found then. Works for this process's own pid
  // as well, with mappings of its own.
  static Result<std::unique_ptr<PeerMemory>> open(int pid, int table_fd);

  // Where [owner_address, owner_address + bytes) of the neighbour's address space lies in this one,
  // to be read and written; nullptr where it is not memory of its arena. The owner must have made
  // the address known after it allocated the block (arena_table.h). The first call for a segment
  // maps it: some microseconds; the pages of it then cost a fault each at their first use, read or
  // written sixteen and one at a time. Later calls look at one shared word and a short list.
  std::byte* find(const std::byte* owner_address, size_t bytes) {
    if (table()->epoch.load(std::memory_order_acquire) != epoch_) refresh();
    auto address = reinterpret_cast<uint64_t>(owner_address);
    if (last_ < known_.size()) {
      const Known& k = known_[last_];
      if (k.mapping.address() != nullptr && within(k, address, bytes)) return at(k, address);
    }
    return look_up(address, bytes);
  }
  // Segments mapped now.
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
    return static_cast<std::byte*>(k.mapping.address()) + (address - k.base);
  }
  const ArenaTable* table() const { return static_cast<const ArenaTable*>(table_.address()); }
  void refresh();
  std::byte* look_up(uint64_t address, size_t bytes);
  void map(Known& segment) const;

  int pid_ = 0;
  Mapping table_;
  uint64_t epoch_ = UINT64_MAX;  // of what is known
  std::vector<Known> known_;     // by base
  size_t last_ = 0;              // the last hit
};

}  // namespace smddp::intranode
