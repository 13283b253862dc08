// The context of an operation that libfabric holds.
#pragma once

#include <rdma/fabric.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace smddp::fabric {

inline constexpr size_t kReceives = 32;  // of messages, per rail
// The most operations besides them that a rail holds at once.
inline constexpr size_t kMostOperations = 1368;

enum class SlotKind : uint8_t { kReceive, kSend, kChunkSend, kChunkReceive, kFlush };

// libfabric returns it with the completion. FI_CONTEXT2 lets a provider write into `context` while
// it holds the operation.
struct Slot {
  fi_context2 context;
  SlotKind kind;
  uint8_t rail;  // that the operation was started on

  static Slot* of(void* op_context) { return static_cast<Slot*>(op_context); }
};
static_assert(std::is_standard_layout_v<Slot> && offsetof(Slot, context) == 0);

struct ReceiveSlot : Slot {
  std::byte* data;
};

}  // namespace smddp::fabric
