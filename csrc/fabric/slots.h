// The contexts of the operations that libfabric holds: messages, chunks, receives and flush reads.
// Each class of this room that starts operations has a fixed number of slots, made when the
// endpoint opens; the data path takes them from a free list and puts them back.
#pragma once

#include <rdma/fabric.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fabric/endpoint.h"
#include "fabric/mr_cache.h"
#include "fabric/wire.h"

namespace smddp::fabric {

inline constexpr size_t kMaxMessage = message_of(128 << 10);
inline constexpr size_t kReceives = 32;  // per rail
inline constexpr size_t kDataSends = 24;
inline constexpr size_t kControlSends = 64;
static_assert((kReceives + kDataSends) * kMaxMessage + kControlSends * kControlMessage <
              (8u << 20));

// Chunks that libfabric holds at once: sends, and receives of tagged messages.
inline constexpr size_t kChunkSends = 256;
inline constexpr size_t kChunkSendsPerPeer = 16;
inline constexpr size_t kChunkReceives = 1024;
inline constexpr size_t kChunkReceivesPerRegion = 64;
// Reads that flush a device's memory.
inline constexpr size_t kFlushes = 64;

enum class Operation : uint8_t { kReceive, kSend, kChunkSend, kChunkReceive, kFlush };

// libfabric returns it with the completion. FI_CONTEXT2 lets a provider write into `context` while
// it holds the operation.
struct Slot {
  fi_context2 context;
  Operation operation;
  uint8_t rail;  // that the operation was started on

  static Slot* of(void* op_context) { return static_cast<Slot*>(op_context); }
};
static_assert(std::is_standard_layout_v<Slot> && offsetof(Slot, context) == 0);

struct ReceiveSlot : Slot {
  std::byte* data;
};

// A message, or a chunk that is sent from a message buffer.
struct SendSlot : Slot, SendBuffer {
  Peer to;
  size_t size;
  bool control;
  bool chunk;
  uint32_t index;     // of the chunk, in
  wire::Grant grant;  // this region
  SendSlot* next;     // in the free list or in a peer's FIFO
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
  ChunkReceiveSlot* next;  // in the free list
};

// A rail's read of a region of its own process, after the writes into it.
struct FlushSlot : Slot {
  uint32_t region;
  FlushSlot* next;  // in the free list
};

// Intrusive queue: a slot is in at most one.
template <class T>
class SlotQueue {
 public:
  bool empty() const { return head_ == nullptr; }
  size_t size() const { return size_; }
  void push(T* slot) {
    slot->next = nullptr;
    (head_ == nullptr ? head_ : tail_->next) = slot;
    tail_ = slot;
    ++size_;
  }
  void push_front(T* slot) {
    slot->next = head_;
    if (head_ == nullptr) tail_ = slot;
    head_ = slot;
    ++size_;
  }
  T* pop() {
    T* slot = head_;
    head_ = slot->next;
    --size_;
    return slot;
  }

 private:
  T* head_ = nullptr;
  T* tail_ = nullptr;
  size_t size_ = 0;
};

}  // namespace smddp::fabric
