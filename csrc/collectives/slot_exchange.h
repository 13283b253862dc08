// A small operation inside one host: each rank pushes one piece, which a slot holds, and takes in one of each of the
// others. Blocks are copied out of the slots, vectors are summed there in rank order, and of a message only the sender's
// piece has bytes.
//
// Most such operations are over within a microsecond, in which a fragment can hardly be made. So an exchange knows
// success alone: the Group begins one, looks at it for a moment, and makes it a fragment as soon as anything else is to
// be done, such as waiting, or saying what has failed. Under the engine's lock.
#pragma once

#include <memory>

#include "collectives/fragment.h"
#include "collectives/own_shard.h"

namespace smddp {

class SlotExchange {
 public:
  // Of an operation whose plan is whole, which lives longer.
  SlotExchange(const FragmentContext& context, Operation& operation);

  bool pushed() const { return pushed_; }
  // Pushes this rank's piece, as one of fragment `seq`. False: no slot is free.
  bool push(uint64_t seq);
  // Takes in what the peers have pushed of fragment `seq`. Leaves alone what is no piece of this operation.
  void look(uint64_t seq);
  // The same for the fragment, true if it took in anything. head(i): local peer i's piece, or nullptr; take(i, piece):
  // this rank is done with it; misfit(i): it is out of bounds.
  template <class Head, class Take, class Misfit>
  bool look(Head&& head, Take&& take, Misfit&& misfit);
  bool has_taken(int i) const { return taken_[static_cast<size_t>(i)]; }
  // In the piece of `rank`.
  size_t bytes_of(Rank rank) const;
  bool complete() const { return pushed_ && left_ == 0; }

 private:
  // In one host all pieces take it.
  static constexpr intranode::Lane kLane = intranode::Lane::kSums;

  // Copies this rank's bytes into a slot.
  void fill(std::byte* slot, bool streaming) const;
  // Whether the other ranks read this block of this rank's vector.
  bool is_read_by_peers(Rank block) const {
    return block != rank_ || operation_.collective == Collective::kAllReduce;
  }
  bool fits(int i, const intranode::Piece& piece) const;
  // Sums this rank's vector and those in the peers' slots, as far as this rank keeps the result.
  void sum();
  // `block` begins at byte `begin` of the vector; its sum is block `result` of the output.
  void sum_block(Rank block, Rank result, size_t begin);
  template <class Take>
  void take_in(int i, const intranode::Piece& piece, Take&& take);

  LocalPeers& local_;
  Operation& operation_;
  const Rank rank_;
  const int ranks_;
  const bool sums_;
  OwnShard own_;
  bool pushed_ = false;
  int left_;                     // local peers whose pieces are still to be taken in
  SmallVector<bool, 16> taken_;  // by local peer
};

// `begun`: of this operation; its piece, if it is pushed, is one of fragment `seq`.
std::unique_ptr<Fragment> make_slot_exchange(const FragmentContext& context,
                                             std::shared_ptr<Operation> operation, uint64_t seq,
                                             SlotExchange begun);

template <class Head, class Take, class Misfit>
bool SlotExchange::look(Head&& head, Take&& take, Misfit&& misfit) {
  bool moved = false;
  int here = 0;
  for (int i = 0; i < local_.count(); ++i) {
    const intranode::Piece* piece = has_taken(i) ? nullptr : head(i);
    if (piece == nullptr) continue;
    if (!fits(i, *piece)) {
      misfit(i);
      return moved;
    }
    ++here;
    if (sums_) continue;
    operation_.output.write(local_.rank(i), 0, local_.inbox(i).bytes(kLane), piece->bytes);
    operation_.taken.slots += piece->bytes;
    take_in(i, *piece, take);
    moved = true;
  }
  // This rank's vector must be out of the input before the result comes.
  if (!sums_ || here == 0 || here < left_ || !pushed_) return moved;
  sum();
  for (int i = 0; i < local_.count(); ++i) take_in(i, *head(i), take);
  return true;
}

template <class Take>
void SlotExchange::take_in(int i, const intranode::Piece& piece, Take&& take) {
  taken_[static_cast<size_t>(i)] = true;
  --left_;
  take(i, piece);
}

}  // namespace smddp
