// The contexts of the operations that libfabric holds: receives, messages, chunks and flush reads. Each class
// that starts operations has a fixed number of them, made when the endpoint opens; the data path takes them
// from a free list and puts them back.
#pragma once

#include <rdma/fabric.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "transport/ofi/types.h"

namespace smddp::ofi {

struct Registration;

// libfabric returns it with the completion. FI_CONTEXT2 lets a provider write into `context` while
// it holds the request.
struct Request {
  enum class Kind : uint8_t { kReceive, kSend, kWrite, kFlush };
  fi_context2 context;
  Kind kind;
  uint8_t rail;  // that the request was started on

  static Request* of(void* op_context) { return static_cast<Request*>(op_context); }
};
static_assert(std::is_standard_layout_v<Request> && offsetof(Request, context) == 0);

// Intrusive queue, for free lists and FIFOs: a request is in at most one.
template <class T>
class RequestQueue {
 public:
  bool empty() const { return head_ == nullptr; }
  size_t size() const { return size_; }
  void push(T* request) {
    request->next = nullptr;
    (head_ == nullptr ? head_ : tail_->next) = request;
    tail_ = request;
    ++size_;
  }
  void push_front(T* request) {
    request->next = head_;
    if (head_ == nullptr) tail_ = request;
    head_ = request;
    ++size_;
  }
  T* pop() {
    T* request = head_;
    head_ = request->next;
    --size_;
    return request;
  }

 private:
  T* head_ = nullptr;
  T* tail_ = nullptr;
  size_t size_ = 0;
};

// Bounded by their memory, as asserted below. Not measured: fewer.
inline constexpr size_t kReceives = 32;  // of messages, per rail
inline constexpr size_t kDataSends = 24;
inline constexpr size_t kControlSends = 64;
static_assert((kReceives + kDataSends) * kMaxMessage + kControlSends * kControlMessage <
              (8u << 20));
// Chunks from the callers' memory that libfabric holds at once. Not measured.
inline constexpr size_t kChunkWrites = 256;
inline constexpr size_t kChunkWritesPerPeer = 16;
// Reads that flush a device's memory.
inline constexpr size_t kFlushReads = 64;
// The most operations that a rail holds at once, besides its receives.
inline constexpr size_t kMostRequests = kDataSends + kControlSends + kChunkWrites + kFlushReads;

struct MessageReceive : Request {
  std::byte* data;
};

// A message, or a chunk that is written from a message buffer.
struct MessageSend : Request, MessageBuffer {
  Peer to;
  size_t size;
  bool control;
  bool chunk;
  uint32_t index;               // of the chunk, in
  wire::Grant grant;            // this region
  uint32_t* pending = nullptr;  // of the chunk; nullptr: it is not counted
  MessageSend* next;            // in the free list or in a peer's FIFO
};

// A chunk written from the caller's memory.
struct ChunkWrite : Request {
  Peer to;
  size_t size;
  uint32_t* pending;
  Registration* registration;  // of the memory; nullptr: none needed
  ChunkWrite* next;            // in the free list
};

// A rail's read of a region of its own process, after the writes into it.
struct FlushRead : Request {
  uint32_t region;
  FlushRead* next;  // in the free list
};

}  // namespace smddp::ofi
