// Tagged receives: how a region's chunks are received when they travel as tagged messages. Posts
// the receives of the chunks that come next, and posts more as they complete. Knows nothing of
// grants and observers. Called by ChunkReceiver only.
#pragma once

#include <vector>

#include "transport/ofi/peer_table.h"
#include "transport/ofi/receive_region.h"

namespace smddp::fabric {

class TaggedReceives {
 public:
  TaggedReceives(RailSet& rails, PeerTable& peers, ReceiveRegionTable& regions);

  // Whether there are enough free receives for a region of so many chunks.
  bool has_room(uint32_t chunks) const;
  // Gives the region a tag; false: there are no random numbers for it.
  static bool draw_tag(ReceiveRegion& region);
  // Posts its first receives.
  void open(ReceiveRegion& region);

  struct Chunk {
    uint32_t region, index;
  };
  // A receive has completed, with its chunk or with an error.
  Chunk finish(ChunkReceiveSlot* slot);
  // Posts the receives that may be posted by now.
  void expect(ReceiveRegion& region);

  // Takes back the receives of a closed region; finish() is called for each.
  void cancel(ReceiveRegion& region);

  // Regions with receives that the provider has refused, or for which no slot was free.
  bool waits() const { return !short_.empty(); }
  void retry();

 private:
  RailSet& rails_;
  PeerTable& peers_;
  ReceiveRegionTable& regions_;
  std::vector<ChunkReceiveSlot> slots_;
  SlotQueue<ChunkReceiveSlot> free_;
  std::vector<uint32_t> short_;  // numbers of regions
};

}  // namespace smddp::fabric
