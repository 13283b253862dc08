// How one chunk travels over one rail: as a write, or as a tagged message.
#pragma once

#include "transport/ofi/rail.h"
#include "transport/ofi/rail_set.h"
#include "transport/wire.h"

namespace smddp::fabric {

struct Chunk {
  const wire::Grant& grant;  // of its region
  uint32_t index;
  const std::byte* data;
  size_t bytes;
};

// Starts the chunk: 0, -FI_EAGAIN, or the error that refused it. `descriptor`: as of Rail::write().
inline ssize_t start(const Chunk& chunk, const RailSet& rails, Rail& rail, Slot* slot,
                     const PeerAddress& to, void* descriptor) {
  const wire::Grant& grant = chunk.grant;
  fi_addr_t address = to.by_rail[rail.index()];
  if (rails.transfer() == Transfer::kTagged) {
    return rail.send_tagged(slot, address, chunk.data, chunk.bytes, descriptor,
                            wire::tag_of(grant.keys[0], chunk.index));
  }
  return rail.write(slot, address, chunk.data, chunk.bytes, descriptor,
                    grant.address + uint64_t{chunk.index} * grant.chunk_bytes,
                    grant.keys[rail.index() % to.rails], !rails.orders_messages());
}

}  // namespace smddp::fabric
