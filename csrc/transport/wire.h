// Every struct that crosses the network. Little-endian, no padding, fixed width. A receiver checks
// magic, key, type and bounds (check() in wire.cc), and then the keyed hash, before it uses any other
// field: no byte from the network chooses an address or a length, and no process without the job's
// secret says anything. Knows nothing of libfabric. Used by transports and by the groups.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/signature.h"
#include "common/siphash.h"

namespace smddp::wire {

inline constexpr uint32_t kMagic = 0x34444d53;  // "SMD4"; the digit is the protocol's version

enum class Type : uint8_t {
  kReady = 1,  // src has started fragment `seq` and can take dst's data for it; maybe with a Grant
  kData =
      2,  // `raw_bytes` bytes at `offset` of the flow that goes from src to dst in this fragment
  kAbort = 3,  // src gave the group up from fragment `seq` on; the payload is the reason, as text
  kWritten =
      4,  // chunks of src's flow to dst in this fragment are in dst's memory, from chunk `offset` on: one
          // length for each, see kMostTold
  kClosed = 5,  // src has given the group up, and writes no more into dst's memory for it
  kAsk =
      6,  // src lacks bytes of dst's flow in this fragment, of which nothing has come for a while
  kSentAll = 7,  // the answer, if all bytes of src's flow to dst in this fragment have left
  kLeaving =
      8,  // src is about to leave the group, and asks whether all its messages to dst have arrived
  kTaken = 9,  // the answer, if they have
};

// The most NICs that one endpoint may be striped over.
inline constexpr size_t kMaxRails = 8;

inline constexpr uint32_t kMaxChunks = 1u << 20;  // of a region

// The payload of a WRITTEN: for each chunk how many bytes of it are coded, at the beginning of its place in the
// region, as a uint32_t. 0: it is not coded. Of so many chunks at most.
inline constexpr size_t kMostTold = 256;

// The payload of a READY if its sender has opened a region for the peer: where the chunks go. The keys are the
// network's own, one per NIC of the receiver; they open that memory and no other.
struct Grant {
  uint32_t region;       // its number at the receiver
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
  uint32_t target;  // receiver's
  uint64_t
      offset;  // DATA: into the flow. READY: how many bytes of its flow the peer may send by now.
  uint32_t bytes;      // of the payload after this header
  uint32_t raw_bytes;  // DATA: that the payload stands for; more than `bytes` if it is coded
  uint64_t
      counter;  // of the messages from source to target in this group, from 0: none comes twice
  Signature signature;
  uint64_t mac;  // keyed hash of all that stands before it, and of the payload if that is no data
};
static_assert(sizeof(Header) == 104);

// The keyed hash of a message whose header is complete but for it. It does not cover DATA's payload: a
// stranger who can't change packets on their way can't get a payload behind a valid header.
uint64_t mac_of(const siphash::Key& key, const Header& header, const void* payload);

// True if `data` (`size` bytes) starts with a header of this protocol, `bytes` is exactly the number of
// bytes after it, and DATA stands for no fewer.
bool check(const void* data, size_t size);

// True if `grant` is for `bytes` bytes, in a number of chunks that a region may have.
bool check(const Grant& grant, uint64_t bytes);

}  // namespace smddp::wire
