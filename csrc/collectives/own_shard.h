// The shard that this rank contributes to an AllGather, or its own block of an all-to-all: where its bytes
// are read from, and its copy into the output. It knows nothing of peers and flows. AllGather and AllToAll
// call it.
#pragma once

#include <cstddef>

#include "collectives/operation.h"

namespace smddp {

class OwnShard {
 public:
  // Bytes [begin, begin + limit) of the shard of `rank`.
  OwnShard(const Operation& operation, Rank rank, size_t begin, size_t limit)
      : operation_(operation), rank_(rank), begin_(begin), limit_(limit) {}

  // Called once, before the functions below. `streaming`: the output is written past the caches.
  void start(bool streaming) {
    streaming_ = streaming;
    if (in_place()) copied_ = bytes();
  }

  size_t bytes() const { return operation_.output.bytes(rank_, begin_, limit_); }
  // The memory that the shard is read from.
  const Blocks& blocks() const { return in_place() ? operation_.output : operation_.input; }
  Rank block() const { return in_place() || pairwise(operation_.collective) ? rank_ : 0; }
  void read(size_t offset, std::byte* to, size_t bytes, bool streaming = false) const {
    blocks().read(block(), begin_ + offset, to, bytes, streaming);
  }

  size_t copied() const { return copied_; }  // bytes that are in the output, from the start
  // Copies some more of it into the output. False if all is there.
  bool copy_some();
  void copy_until(size_t end);
  // Bytes [offset, offset + bytes) to `slot`. They go into the output as well if that saves a second read:
  // the copied part ends at `offset`, input and output lie end to end there, and the caches are to keep the
  // output. A shard of one slot is copied while the peers' shards are on their way.
  void fill(std::byte* slot, size_t offset, size_t bytes, bool streaming);

 private:
  // AllReduce gathers in place: its sums already lie in their block of the output. So do the bytes of the
  // root of a Broadcast.
  bool in_place() const {
    return operation_.collective == Collective::kAllReduce ||
           operation_.collective == Collective::kBroadcast;
  }

  const Operation& operation_;
  const Rank rank_;
  const size_t begin_;
  const size_t limit_;
  bool streaming_ = false;
  size_t copied_ = 0;
};

}  // namespace smddp
