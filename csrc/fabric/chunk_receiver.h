// The receiving side of chunks: opens regions for peers, and tells each region's observer of the
// chunks that have arrived. Knows nothing of messages. Called by Endpoint only.
#pragma once

#include <string>

#include "fabric/flush_reads.h"
#include "fabric/peer_table.h"
#include "fabric/receive_region.h"
#include "fabric/tagged_receives.h"

namespace smddp::fabric {

class ChunkReceiver {
 public:
  ChunkReceiver(RailSet& rails, PeerTable& peers);

  // As Endpoint::open_region() and Endpoint::close_region().
  bool open(Peer from, std::byte* memory, size_t bytes, size_t chunk_bytes, ChunkObserver* observer,
            wire::Grant* grant);
  void close(uint32_t number, bool complete);

  // For memory of a device. Later calls do nothing.
  Status prepare_flushes() { return flushes_.prepare(); }

  // A peer has written a chunk; a tagged receive or a flush read has completed, or completed with
  // an error.
  void on_written(uint32_t immediate);
  void on_received(ChunkReceiveSlot* slot, size_t bytes);
  void on_receive_failed(ChunkReceiveSlot* slot) { (void)tagged_.finish(slot); }
  void on_flushed(FlushSlot* slot);
  void on_flush_failed(FlushSlot* slot, const std::string& why) { flushes_.on_failed(slot, why); }

  // Whether there are receives or flush reads to start again.
  bool waits() const { return tagged_.waits() || flushes_.waits(); }
  void retry() {
    tagged_.retry();
    flushes_.retry();
  }
  bool idle() const { return flushes_.idle(); }

 private:
  bool register_memory(ReceiveRegion& region);
  void arrived(uint32_t number, uint32_t index);

  RailSet& rails_;
  PeerTable& peers_;
  ReceiveRegionTable regions_;
  TaggedReceives tagged_;
  FlushReads flushes_;
  bool virtual_addresses_;  // of memory that peers write into; otherwise offsets
};

}  // namespace smddp::fabric
