// The signature of an operation: what a rank takes the operation to be. It travels with every
// message of the operation, in the host's segment and on the fabric. A receiver compares it with
// its own before it touches a byte of data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "common/types.h"

namespace smddp {

using JobKey = std::array<uint8_t, 16>;

// Most bytes of the sentence that says why a rank has given up a group.
inline constexpr size_t kReasonBytes = 1024;

inline constexpr uint8_t kPartialsInFp32 = 1;  // partial sums travel in fp32
inline constexpr uint8_t kLogPattern = 2;      // the logarithmic pattern between hosts
inline constexpr uint8_t kSumsOnCpu = 4;       // sums of a device's tensors
inline constexpr uint8_t kJointPattern = 8;    // one message per pair of hosts
// Parts of these collectives, of which devices compute the sums.
inline constexpr uint8_t kOfReduceScatter = 16, kOfAllReduce = 32;

struct Signature {
  Collective collective = Collective::kBarrier;
  Dtype dtype = Dtype::kBytes;
  ReduceOp reduce_op = ReduceOp::kNone;
  uint8_t options = 0;    // choices on which the ranks must agree: those above
  uint32_t segments = 0;  // tensors in this operation
  // Of all ranks' blocks. If each pair of ranks has a block of its own, what travels between two ranks has the
  // bytes of their block: so they notice if they disagree about it.
  uint64_t bytes = 0;
  uint64_t fragment_bytes = 0;  // of each rank's block that one fragment carries; 0: all
  // In the low half over the tensors' sizes and element types, in the high half over the parameters that they are,
  // where the caller says it.
  uint64_t digest = 0;
  friend bool operator==(const Signature&, const Signature&) = default;
};
static_assert(sizeof(Signature) == 32);

// The signature of what travels between two ranks, in an operation with this one: with the bytes of their block if
// each pair of ranks has a block of its own.
inline Signature between_two(Signature signature, uint64_t pair_bytes) {
  if (pairwise(signature.collective)) signature.bytes = pair_bytes;
  return signature;
}

// One step of a digest over the tensors' sizes and types. Two ranks that disagree about one tensor
// get different digests: each step is invertible.
inline uint64_t extend_digest(uint64_t digest, uint64_t value) {
  digest = (digest ^ value) * 0x9e3779b97f4a7c15ull;
  return digest ^ digest >> 32;
}
// That of no text is 0.
inline uint64_t digest_of_text(const std::string& text) {
  uint64_t digest = 0;
  for (char c : text) digest = extend_digest(digest, static_cast<unsigned char>(c));
  return digest;
}

std::string describe(const Signature& signature);
// The sentence that rank `other` called `theirs`, and this rank, `self`, called `ours`, which differs.
std::string disagreement(const std::string& other, const Signature& theirs, const std::string& self,
                         const Signature& ours);

}  // namespace smddp
