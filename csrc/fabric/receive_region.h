// The receiver's side of regions: which are open, and which of their chunks have come. Knows nothing
// of libfabric.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "fabric/endpoint.h"
#include "fabric/wire.h"

namespace smddp::fabric {

struct Registration;

struct ReceiveRegion {
  uint32_t number = 0;
  bool open = false;
  Peer from = 0;
  std::byte* memory = nullptr;
  size_t bytes = 0, chunk_bytes = 0;
  uint32_t chunks = 0;
  uint32_t missing = 0;  // chunks that have not come
  ChunkObserver* observer = nullptr;
  std::vector<uint64_t> arrived;                             // a bit per chunk
  std::array<Registration*, wire::kMaxRails> registrations;  // by rail; nullptr: none needed
  // In a device's memory only:
  bool lent = false;
  uint32_t last = 0;                   // chunk that came last, not told before it is flushed
  uint32_t flushing = 0, flushed = 0;  // rails whose read has begun, is over
  // Of tagged messages only:
  uint32_t tag = 0;       // upper half of the chunks' tags
  uint32_t next = 0;      // first chunk whose receive has not been posted
  uint32_t window = 0;    // receives it may have posted,
  uint32_t expected = 0;  // and has

  size_t size_of(uint32_t chunk) const {
    size_t offset = size_t{chunk} * chunk_bytes;
    return bytes - offset < chunk_bytes ? bytes - offset : chunk_bytes;
  }
};

class ReceiveRegionTable {
 public:
  // nullptr: no number is free, or there would be too many chunks for one.
  ReceiveRegion* open(Peer from, std::byte* memory, size_t bytes, size_t chunk_bytes,
                      ChunkObserver* observer);
  // `again`: its number may be given to a later region.
  void close(ReceiveRegion* region, bool again);
  // nullptr where no region of that number is open, among them those closed too early.
  ReceiveRegion* find(uint32_t number);
  // Open or not; `number` is of one that was.
  ReceiveRegion& at(uint32_t number) { return regions_[number]; }
  // Marks the chunk. False where it is none of the region's, or has come before.
  static bool arrive(ReceiveRegion& region, uint32_t chunk);

 private:
  std::deque<ReceiveRegion> regions_;  // by number; elements stay where they are
  std::deque<uint32_t> free_;          // longest free first
};

}  // namespace smddp::fabric
