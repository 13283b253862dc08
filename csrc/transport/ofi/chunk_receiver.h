// The receiving side of chunks: opens regions for peers, and tells each region's observer of the
// chunks that have arrived. Knows nothing of messages. The groups open and close regions; the
// Endpoint passes completions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/ofi/endpoint.h"
#include "transport/ofi/receive_region.h"
#include "transport/wire.h"

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
  // Ends the sender's right to write into the region's memory. `over`: all chunks have arrived, or the
  // sender sends no more. Otherwise the memory has to outlive the endpoint: a chunk that is under way may
  // still arrive. A chunk that is written later breaks the connection to its sender, and one that is sent as
  // a tagged message still arrives.
  void close(uint32_t region, bool over);
  // Whether all chunks of an open region have arrived.
  bool complete(uint32_t region);

  // For memory of a device. Later calls do nothing.
  Status prepare_flushes();

  // The sender of the region has said that its first `chunks` chunks have been written. False: the
  // region has fewer, or is not open.
  bool confirm(uint32_t region, uint64_t chunks);

  // A tagged receive or a flush read has completed, or completed with an error.
  void on_received(ChunkReceiveSlot* slot, size_t bytes);
  // False: the receive was cancelled, because its region is closed.
  bool on_receive_failed(ChunkReceiveSlot* slot);
  void on_flushed(FlushSlot* slot);
  void on_flush_failed(FlushSlot* slot, const Status& why);

  // Region numbers that have been given out so far; those of closed regions are given out again.
  size_t numbers() const { return regions_.size(); }

  // Whether a region's number is given out: chunks may arrive.
  bool has_open() const { return regions_.has_open(); }
  // Whether there are receives or flush reads to start again.
  bool waits() const;
  void retry();
  bool idle() const;

 private:
  bool register_memory(ReceiveRegion& region);
  void arrived(uint32_t number, uint32_t index);
  void release(ReceiveRegion& region);  // one that is closed

  RailSet& rails_;
  PeerTable& peers_;
  ReceiveRegionTable regions_;
  std::unique_ptr<TaggedReceives> tagged_;
  std::unique_ptr<FlushReads> flushes_;
  bool virtual_addresses_;  // of memory that peers write into; otherwise offsets
};

}  // namespace smddp::fabric
