// The types that all folders share: operations, element types, reductions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smddp {

using Rank = int32_t;

enum class Collective : uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBarrier,
  kBroadcast,  // an AllGather of which all blocks but the root's are empty
  kReduce,     // a ReduceScatter of which all blocks but the root's are empty
  kAllToAll,
  kGather,   // an all-to-all of which only the blocks for the root exist
  kScatter,  // an all-to-all of which only the blocks of the root exist
  // A message of rank 0 of a group of two to rank 1, its root: what the sender calls it, and the receiver.
  kSend,
  kReceive,
};
inline constexpr size_t kCollectives = 11;
inline bool is_message(Collective collective) {
  return collective == Collective::kSend || collective == Collective::kReceive;
}
// Whether it sums.
inline bool sums(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllReduce ||
         collective == Collective::kReduce;
}

// Whether each pair of ranks has a block of its own, of a size that only these two know.
inline bool pairwise(Collective collective) {
  return collective == Collective::kAllToAll || collective == Collective::kGather ||
         collective == Collective::kScatter || is_message(collective);
}

// kBytes is any type that is only moved, never summed; its element size is part of the byte counts.
enum class Dtype : uint8_t {
  kBytes,
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat16,
  kInt8,
  kUInt8,
  kInt16,
  kUInt16,
  kInt32,
  kUInt32,
  kInt64,
  kUInt64,
};
inline constexpr size_t kDtypes = 13;

enum class ReduceOp : uint8_t { kNone, kSum, kAvg, kMin, kMax, kProduct };

size_t size_of(Dtype dtype);
const char* name_of(Collective collective);
const char* name_of(Dtype dtype);
const char* name_of(ReduceOp op);

}  // namespace smddp
