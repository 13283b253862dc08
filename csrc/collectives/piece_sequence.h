// How a ReduceScatter cuts blocks into pieces inside a host, and the order of these pieces. All ranks of
// the host compute the same sequence. It knows sizes and ranks only, no memory. ReduceScatter walks it
// twice: over the pieces that it pushes, and over those that it sums.
#pragma once

#include <cstddef>

#include "collectives/blocks.h"
#include "common/small_vector.h"
#include "common/types.h"
#include "topology/topology.h"

namespace smddp {

struct BlockPiece {
  int position = 0;  // of the block in the order of the host
  Rank block = 0;
  size_t offset = 0;  // into the fragment's part of the block
  size_t bytes = 0;   // 0: the end of the sequence
};

// The sequence runs over all blocks at one offset, then on to the next offset. Blocks of other hosts come
// before those of this host, because they have further to go.
class PieceSequence {
 public:
  PieceSequence(const Topology& topology, Rank rank, const Blocks& blocks, size_t begin,
                size_t limit)
      : topology_(topology),
        rank_(rank),
        host_(topology.node_of(rank)),
        blocks_(blocks),
        begin_(begin),
        limit_(limit) {}

  // Sets the length of the pieces. Called once, before the functions below.
  void start(size_t piece_bytes);

  // Whether this rank sums its host's contributions to `block`.
  bool sums_here(Rank block) const;
  // The first piece among those that this rank sums (`here`) or that its local peers sum, and the next one
  // after `piece`.
  BlockPiece first(bool here) const { return next({.position = -1}, here); }
  BlockPiece next(BlockPiece piece, bool here) const;

 private:
  const Topology& topology_;
  const Rank rank_;
  const int host_;
  const Blocks& blocks_;
  const size_t begin_;
  const size_t limit_;
  size_t piece_bytes_ = 0;
  SmallVector<Rank, 16> order_;  // of the blocks, the same on all ranks of the host
};

}  // namespace smddp
