// The regions that this endpoint has opened for its peers: their memory, and which of their chunks
// have arrived. Knows nothing of libfabric. Called by the receiving classes of this room only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "transport/ofi/endpoint.h"
#include "transport/wire.h"

namespace smddp::fabric {

struct Registration;

struct ReceiveRegion {
  uint32_t number = 0;
  bool open = false;
  Peer from = 0;
  std::byte* memory = nullptr;
  size_t bytes = 0, chunk_bytes = 0;
  uint32_t chunks = 0;
  uint32_t missing = 0;  // chunks that have not arrived
  ChunkObserver* observer = nullptr;
  std::vector<uint64_t> arrived;                             // a bit per chunk
  std::array<Registration*, wire::kMaxRails> registrations;  // by rail; nullptr: none needed
  // For writes only:
  uint64_t address = 0;  // of the first byte, for those that have a key: Grant::address
  // In a device's memory only:
  bool lent = false;
  uint32_t last = 0;                   // the chunk that arrived last: told after the flush
  uint32_t flushing = 0, flushed = 0;  // rails whose flush read has begun, has completed
  bool flush_failed = false;           // one of them
  // For tagged messages only:
  uint64_t tag = 0;            // base of the chunks' tags
  uint32_t next = 0;           // first chunk whose receive has not been posted
  uint32_t most_expected = 0;  // receives that may be posted at once
  uint32_t expected = 0;       // receives that are posted
  bool waits = false;          // in the list of TaggedReceives

  size_t size_of(uint32_t chunk) const {
    size_t offset = size_t{chunk} * chunk_bytes;
    return bytes - offset < chunk_bytes ? bytes - offset : chunk_bytes;
  }
};

class ReceiveRegionTable {
 public:
  // nullptr: no number is free, or the region would have too many chunks.
  ReceiveRegion* open(Peer from, std::byte* memory, size_t bytes, size_t chunk_bytes,
                      ChunkObserver* observer);
  // Its number may be given to a later region.
  void close(ReceiveRegion* region);
  // nullptr if no region of that number is open.
  ReceiveRegion* find(uint32_t number);
  // Open or closed; `number` must be that of a region that was opened.
  ReceiveRegion& at(uint32_t number) { return regions_[number]; }
  size_t size() const { return regions_.size(); }
  bool has_open() const { return regions_.size() > free_.size(); }
  // Marks the chunk as arrived. False if it is not one of the region's, or has arrived before.
  static bool arrive(ReceiveRegion& region, uint32_t chunk);

 private:
  std::deque<ReceiveRegion> regions_;  // by number; elements stay where they are
  std::deque<uint32_t> free_;          // longest free first
};

}  // namespace smddp::fabric
