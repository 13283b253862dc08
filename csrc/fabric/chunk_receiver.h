// The receiving side of chunks: opens regions for peers, and tells each region's observer of the
// chunks that have arrived. Knows nothing of messages. The groups open and close regions; the
// Endpoint passes completions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "fabric/endpoint.h"
#include "fabric/receive_region.h"
#include "fabric/wire.h"

namespace smddp::fabric {

class FlushReads;
class TaggedReceives;
struct ChunkReceiveSlot;
struct FlushSlot;

class ChunkReceiver {
 public:
  ChunkReceiver(RailSet& rails, PeerTable& peers);
  ~ChunkReceiver();

  // Lets `from`, and no other peer, fill `memory` in chunks of `chunk_bytes`, the last one shorter.
  // Fills *grant, which the sender needs. `observer` is told of every chunk until the
  // region is closed. False: no region is free, the memory can't be registered, or
  // Endpoint::transfer() is kMessages; then the data has to travel in messages.
  bool open(Peer from, std::byte* memory, size_t bytes, size_t chunk_bytes, ChunkObserver* observer,
            wire::Grant* grant);
  // `complete`: every chunk has arrived. Otherwise the region's number is never used again, and
  // chunks that its sender has not sent yet may still be written: the memory has to outlive the
  // endpoint. Revoking the sender's right to write would break the connection to it, with all other
  // traffic on it.
  void close(uint32_t region, bool complete);

  // For memory of a device. Later calls do nothing.
  Status prepare_flushes();

  // A peer has written a chunk; a tagged receive or a flush read has completed, or completed with
  // an error.
  void on_written(uint32_t immediate);
  void on_received(ChunkReceiveSlot* slot, size_t bytes);
  void on_receive_failed(ChunkReceiveSlot* slot);
  void on_flushed(FlushSlot* slot);
  void on_flush_failed(FlushSlot* slot, const std::string& why);

  // Whether there are receives or flush reads to start again.
  bool waits() const;
  void retry();
  bool idle() const;

 private:
  bool register_memory(ReceiveRegion& region);
  void arrived(uint32_t number, uint32_t index);

  RailSet& rails_;
  PeerTable& peers_;
  ReceiveRegionTable regions_;
  std::unique_ptr<TaggedReceives> tagged_;
  std::unique_ptr<FlushReads> flushes_;
  bool virtual_addresses_;  // of memory that peers write into; otherwise offsets
};

}  // namespace smddp::fabric
