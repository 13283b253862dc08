#include "fabric/landing.h"

namespace smddp::fabric {

Landing* LandingTable::open(Peer from, std::byte* memory, size_t bytes, size_t chunk_bytes,
                            Inflow* inflow) {
  if (bytes == 0 || chunk_bytes == 0 || chunk_bytes > UINT32_MAX) return nullptr;
  if ((bytes - 1) / chunk_bytes >= wire::kMaxChunks) return nullptr;
  Landing* landing = nullptr;
  if (!free_.empty()) {
    landing = &landings_[free_.front()];
    free_.pop_front();
  } else if (landings_.size() < wire::kMaxLandings) {
    landing = &landings_.emplace_back();
    landing->number = static_cast<uint32_t>(landings_.size() - 1);
  } else {
    return nullptr;
  }
  landing->open = true;
  landing->from = from;
  landing->memory = memory;
  landing->bytes = bytes;
  landing->chunk_bytes = chunk_bytes;
  landing->chunks = static_cast<uint32_t>((bytes - 1) / chunk_bytes + 1);
  landing->missing = landing->chunks;
  landing->inflow = inflow;
  landing->arrived.assign((landing->chunks + 63) / 64, 0);
  landing->registrations.fill(nullptr);
  landing->lent = false;
  landing->last = landing->flushing = landing->flushed = 0;
  landing->tag = landing->next = landing->window = landing->expected = 0;
  return landing;
}

void LandingTable::close(Landing* landing, bool again) {
  landing->open = false;
  landing->inflow = nullptr;
  if (again) free_.push_back(landing->number);
}

Landing* LandingTable::find(uint32_t number) {
  if (number >= landings_.size() || !landings_[number].open) return nullptr;
  return &landings_[number];
}

bool LandingTable::arrive(Landing& landing, uint32_t chunk) {
  if (chunk >= landing.chunks) return false;
  uint64_t bit = uint64_t{1} << chunk % 64;
  uint64_t& word = landing.arrived[chunk / 64];
  if ((word & bit) != 0) return false;
  word |= bit;
  --landing.missing;
  return true;
}

}  // namespace smddp::fabric
