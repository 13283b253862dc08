#include "fabric/receive_region.h"

namespace smddp::fabric {

ReceiveRegion* ReceiveRegionTable::open(Peer from, std::byte* memory, size_t bytes,
                                        size_t chunk_bytes, ChunkObserver* observer) {
  if (bytes == 0 || chunk_bytes == 0 || chunk_bytes > UINT32_MAX) return nullptr;
  if ((bytes - 1) / chunk_bytes >= wire::kMaxChunks) return nullptr;
  ReceiveRegion* region = nullptr;
  if (!free_.empty()) {
    region = &regions_[free_.front()];
    free_.pop_front();
  } else if (regions_.size() < wire::kMaxRegions) {
    region = &regions_.emplace_back();
    region->number = static_cast<uint32_t>(regions_.size() - 1);
  } else {
    return nullptr;
  }
  region->open = true;
  region->from = from;
  region->memory = memory;
  region->bytes = bytes;
  region->chunk_bytes = chunk_bytes;
  region->chunks = static_cast<uint32_t>((bytes - 1) / chunk_bytes + 1);
  region->missing = region->chunks;
  region->observer = observer;
  region->arrived.assign((region->chunks + 63) / 64, 0);
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
  free_.push_back(region->number);
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
