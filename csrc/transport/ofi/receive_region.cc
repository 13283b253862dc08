#include "transport/ofi/receive_region.h"

#include <new>

namespace smddp::fabric {

ReceiveRegion* ReceiveRegionTable::open(Peer from, std::byte* memory, size_t bytes,
                                        size_t chunk_bytes, ChunkObserver* observer) {
  if (bytes == 0 || chunk_bytes == 0 || chunk_bytes > UINT32_MAX) return nullptr;
  if ((bytes - 1) / chunk_bytes >= wire::kMaxChunks) return nullptr;
  if (free_.empty()) {
    if (regions_.size() == wire::kMaxRegions) return nullptr;
    free_.push_back(static_cast<uint32_t>(regions_.size()));
  }
  if (free_.front() == regions_.size()) regions_.emplace_back().number = free_.front();
  ReceiveRegion* region = &regions_[free_.front()];
  // The last call that may throw: the number is still free.
  region->arrived.assign(((bytes - 1) / chunk_bytes) / 64 + 1, 0);
  free_.pop_front();
  region->open = true;
  region->from = from;
  region->memory = memory;
  region->bytes = bytes;
  region->chunk_bytes = chunk_bytes;
  region->chunks = static_cast<uint32_t>((bytes - 1) / chunk_bytes + 1);
  region->missing = region->chunks;
  region->observer = observer;
  region->registrations.fill(nullptr);
  region->address = 0;
  region->lent = false;
  region->last = region->flushing = region->flushed = 0;
  region->flush_failed = false;
  region->tag = 0;
  region->next = region->most_expected = region->expected = 0;
  return region;
}

void ReceiveRegionTable::close(ReceiveRegion* region) {
  region->open = false;
  region->observer = nullptr;
  try {
    free_.push_back(region->number);
  } catch (const std::bad_alloc&) {  // the number is never used again
  }
}

ReceiveRegion* ReceiveRegionTable::find(uint32_t number) {
  if (number >= regions_.size() || !regions_[number].open) return nullptr;
  return &regions_[number];
}

bool ReceiveRegionTable::arrive(ReceiveRegion& region, uint32_t chunk) {
  if (chunk >= region.chunks) return false;
  uint64_t bit = uint64_t{1} << chunk % 64;
  uint64_t& word = region.arrived[chunk / 64];
  if ((word & bit) != 0) return false;
  word |= bit;
  --region.missing;
  return true;
}

}  // namespace smddp::fabric
