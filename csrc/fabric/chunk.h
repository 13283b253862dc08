// How one chunk travels over one rail: as a write, or as a tagged message.
#pragma once

#include "fabric/rail/rail.h"
#include "fabric/rail_set.h"
#include "fabric/wire.h"

namespace smddp::fabric {

// The tag of a tagged chunk. `upper` is random and differs from region to region.
constexpr uint64_t tag_of(uint32_t upper, uint32_t region, uint32_t chunk) {
  return uint64_t{upper} << 32 | wire::immediate(region, chunk);
}

struct Chunk {
  const wire::Grant& grant;  // of its region
  uint32_t index;
  const std::byte* data;
  size_t bytes;
};

// Starts the chunk: 0, -FI_EAGAIN, or the error that refused it. `descriptor`: as of Rail::write().
inline ssize_t start(const Chunk& chunk, Transfer transfer, Rail& rail, Slot* slot,
                     const PeerAddress& to, void* descriptor) {
  const wire::Grant& grant = chunk.grant;
  fi_addr_t address = to.by_rail[rail.index()];
  if (transfer == Transfer::kTagged) {
    return rail.send_tagged(
        slot, address, chunk.data, chunk.bytes, descriptor,
        tag_of(static_cast<uint32_t>(grant.keys[0]), grant.region, chunk.index));
  }
  return rail.write(slot, address, chunk.data, chunk.bytes, descriptor,
                    grant.address + uint64_t{chunk.index} * grant.chunk_bytes,
                    grant.keys[rail.index() % to.rails],
                    wire::immediate(grant.region, chunk.index));
}

}  // namespace smddp::fabric
