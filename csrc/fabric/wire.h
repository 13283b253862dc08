// Every struct that crosses the network. Little-endian, no padding, fixed width. A receiver checks
// magic, key, type and bounds (check() in wire.cc) before it uses any other field: no byte from the
// network chooses an address or a length. Knows nothing of libfabric. Used by the fabric and by the
// groups.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/signature.h"

namespace smddp::wire {

inline constexpr uint32_t kMagic = 0x31444d53;  // "SMD1"; the digit is the protocol's version

enum class Type : uint8_t {
  kReady = 1,  // src has started fragment `seq` and can take dst's data for it; maybe with a Grant
  kData = 2,   // `bytes` bytes at `offset` of the flow that goes from src to dst in this fragment
  kAbort = 3,  // src gave the group up from fragment `seq` on; the payload is the reason, as text
};

// The most NICs that one endpoint may be striped over.
inline constexpr size_t kMaxRails = 8;

// A write's immediate data has 32 bits (EFA and verbs carry no more): region, then chunk.
inline constexpr uint32_t kRegionBits = 12, kChunkBits = 20;
inline constexpr uint32_t kMaxRegions = 1u << kRegionBits;
inline constexpr uint32_t kMaxChunks = 1u << kChunkBits;
constexpr uint32_t immediate(uint32_t region, uint32_t chunk) {
  return region << kChunkBits | chunk;
}
constexpr uint32_t region_of(uint32_t immediate) { return immediate >> kChunkBits; }
constexpr uint32_t chunk_of(uint32_t immediate) { return immediate & (kMaxChunks - 1); }

// The payload of a READY if its sender has opened a region for the peer: where the chunks go. For
// writes the keys are the provider's own, one per NIC of the receiver; they open that memory and no
// other. For tagged messages keys[0] is the upper half of the tags.
struct Grant {
  uint32_t region;       // the receiver's number for it
  uint32_t chunk_bytes;  // of every chunk but the last
  uint64_t bytes;        // of the region
  uint64_t address;      // of its first byte, as the provider counts: virtual, or 0
  uint64_t keys[kMaxRails];
};
static_assert(sizeof(Grant) == 88);

struct Header {
  uint32_t magic;
  Type type;
  uint8_t reserved[3];
  JobKey key;       // the group's; a message without it is dropped and counted
  uint64_t seq;     // the fragment's number in its group
  uint32_t source;  // sender's rank in the group
  uint32_t zero;
  uint64_t
      offset;  // DATA: into the flow. READY: how many bytes of its flow the peer may send by now
  uint64_t bytes;  // of the payload after this header
  Signature signature;
};
static_assert(sizeof(Header) == 88);

// True if `data` (`size` bytes) starts with a header of this protocol and `bytes` is exactly the
// number of bytes after it.
bool check(const void* data, size_t size);

// True if `grant` is for `bytes` bytes and send_chunk() can use it.
bool check(const Grant& grant, uint64_t bytes);

}  // namespace smddp::wire
