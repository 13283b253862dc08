#include "collectives/piece_sequence.h"

#include <algorithm>

#include "topology/pattern.h"

namespace smddp {

void PieceSequence::start(size_t piece_bytes) {
  piece_bytes_ = piece_bytes;
  for (int i = 1; i <= topology_.nodes(); ++i) {
    for (Rank block : topology_.node((host_ + i) % topology_.nodes())) order_.push_back(block);
  }
}

bool PieceSequence::sums_here(Rank block) const {
  return pattern::reducer(topology_, host_, block) == rank_;
}

BlockPiece PieceSequence::next(BlockPiece piece, bool here) const {
  size_t largest = std::min(limit_, blocks_.largest() > begin_ ? blocks_.largest() - begin_ : 0);
  for (;;) {
    if (++piece.position == topology_.ranks()) {
      piece.position = 0;
      piece.offset += piece_bytes_;
    }
    if (piece.offset >= largest) return {};
    piece.block = order_[static_cast<size_t>(piece.position)];
    size_t size = blocks_.bytes(piece.block, begin_, limit_);
    if (piece.offset >= size || sums_here(piece.block) != here) continue;
    piece.bytes = std::min(piece_bytes_, size - piece.offset);
    return piece;
  }
}

}  // namespace smddp
