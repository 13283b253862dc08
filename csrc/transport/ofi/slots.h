// The contexts of the operations that this room starts: messages, chunks, tagged receives and flush
// reads. Each class that starts operations has a fixed number of slots, made when the endpoint
// opens; the data path takes them from a free list and puts them back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/ofi/endpoint.h"
#include "transport/ofi/message_sender.h"
#include "transport/ofi/mr_cache.h"
#include "transport/ofi/slot.h"
#include "transport/ofi/slot_queue.h"
#include "transport/wire.h"

namespace smddp::fabric {

static_assert(message_of(128 << 10) == kMaxMessage);
inline constexpr size_t kDataSends = 24;
inline constexpr size_t kControlSends = 64;
static_assert((kReceives + kDataSends) * kMaxMessage + kControlSends * kControlMessage <
              (8u << 20));

// Chunks that libfabric holds at once: sends, and receives of tagged messages.
inline constexpr size_t kChunkSends = 256;
inline constexpr size_t kChunkSendsPerPeer = 16;
inline constexpr size_t kChunkReceives = 1024;
inline constexpr size_t kChunkReceivesPerRegion = 64;
static_assert(kDataSends + kControlSends + kChunkSends + kChunkReceives <= kMostOperations);
// Reads that flush a device's memory.
inline constexpr size_t kFlushes = 64;

// A message, or a chunk that is sent from a message buffer.
struct SendSlot : Slot, SendBuffer {
  Peer to;
  size_t size;
  bool control;
  bool chunk;
  uint32_t index;               // of the chunk, in
  wire::Grant grant;            // this region
  uint32_t* pending = nullptr;  // of the chunk; nullptr: nobody counts
  SendSlot* next;               // in the free list or in a peer's FIFO
};

// A chunk sent from the caller's memory.
struct ChunkSendSlot : Slot {
  Peer to;
  size_t size;
  uint32_t* pending;
  Registration* registration;  // of the memory; nullptr: none needed
  ChunkSendSlot* next;         // in the free list
};

// A tagged receive into a region.
struct ChunkReceiveSlot : Slot {
  uint32_t region;
  uint32_t index;
  bool posted = false;
  ChunkReceiveSlot* next;  // in the free list
};

// A rail's read of a region of its own process, after the writes into it.
struct FlushSlot : Slot {
  uint32_t region;
  FlushSlot* next;  // in the free list
};

}  // namespace smddp::fabric
