// The endpoint's message buffers: one slab, cut once, never grown.
#pragma once

#include <rdma/fabric.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fabric/endpoint.h"
#include "fabric/wire.h"

namespace smddp::fabric {

// 128 KiB of payload with a header in front, in whole cache lines.
inline constexpr size_t kMaxMessage = (128 * 1024 + sizeof(wire::Header) + 63) / 64 * 64;
inline constexpr size_t kReceives = 32;
inline constexpr size_t kDataSends = 24;
inline constexpr size_t kControlSends = 64;
static_assert((kReceives + kDataSends) * kMaxMessage + kControlSends * kControlMessage <
              (8u << 20));

// What libfabric hands back with a completion. FI_CONTEXT2 lets a provider write into `context`
// while the operation is its own.
struct Slot {
  fi_context2 context;
  bool is_send;

  static Slot* of(void* op_context) { return static_cast<Slot*>(op_context); }
};
static_assert(std::is_standard_layout_v<Slot> && offsetof(Slot, context) == 0);

struct ReceiveSlot : Slot {
  std::byte* data;
};

struct SendSlot : Slot, SendBuffer {
  Peer to;
  size_t size;
  bool control;
  SendSlot* next;  // in the free list or in a peer's FIFO
};

// Intrusive queue: a SendSlot is in at most one.
class SlotQueue {
 public:
  bool empty() const { return head_ == nullptr; }
  size_t size() const { return size_; }
  void push(SendSlot* slot) {
    slot->next = nullptr;
    (head_ == nullptr ? head_ : tail_->next) = slot;
    tail_ = slot;
    ++size_;
  }
  void push_front(SendSlot* slot) {
    slot->next = head_;
    if (head_ == nullptr) tail_ = slot;
    head_ = slot;
    ++size_;
  }
  SendSlot* pop() {
    SendSlot* slot = head_;
    head_ = slot->next;
    --size_;
    return slot;
  }

 private:
  SendSlot* head_ = nullptr;
  SendSlot* tail_ = nullptr;
  size_t size_ = 0;
};

}  // namespace smddp::fabric
