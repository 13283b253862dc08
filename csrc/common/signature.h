// What a rank believes the operation to be. Travels with every message of it, in the node's segment
// and on the fabric; a receiver compares it with its own before it touches a byte of data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "common/types.h"

namespace smddp {

using JobKey = std::array<uint8_t, 16>;

// Room for the sentence that says why a rank gave a group up.
inline constexpr size_t kReasonBytes = 1024;

inline constexpr uint8_t kPartialsInFp32 = 1;  // partial sums travel in fp32
inline constexpr uint8_t kLogPattern = 2;      // the logarithmic pattern between nodes
inline constexpr uint8_t kSumsOnCpu = 4;       // of tensors on a device
inline constexpr uint8_t kJointPattern = 8;    // one message per pair of nodes

struct Signature {
  Collective collective = Collective::kBarrier;
  Dtype dtype = Dtype::kBytes;
  ReduceOp reduce_op = ReduceOp::kNone;
  uint8_t options = 0;          // choices that must agree: those above
  uint32_t segments = 0;        // tensors in this operation
  uint64_t bytes = 0;           // of all ranks' blocks
  uint64_t fragment_bytes = 0;  // of each rank's block that one round carries
  uint64_t digest = 0;          // over the tensors' sizes and element type
  friend bool operator==(const Signature&, const Signature&) = default;
};
static_assert(sizeof(Signature) == 32);

// One step of a digest over the tensors' sizes and types. Two ranks that disagree about one tensor get
// different digests: each step is invertible.
inline uint64_t extend_digest(uint64_t digest, uint64_t value) {
  digest = (digest ^ value) * 0x9e3779b97f4a7c15ull;
  return digest ^ digest >> 32;
}

std::string describe(const Signature& signature);

}  // namespace smddp
