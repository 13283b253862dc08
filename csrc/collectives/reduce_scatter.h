// ReduceScatter, the mirror of AllGather. Within a node each block is summed by one rank: its
// owner, or the owner's gateway. Gateways send their node's partial sum towards the owner along the
// rail, in the mirrored flows of the selected pattern; whoever receives partials adds them in node
// order, the own node's among them, as far as all have come. Contributions of a node are added in
// rank order. Both orders are fixed, so results do not depend on timing.
//
// All ranks of a node cut all blocks into the same sequence of pieces (Cuts), push those that
// others sum, and sum those that are theirs, piece by piece, once every local peer's head is that
// piece. The least unsummed piece, in sequence order, is always at the head of every outbox or
// about to be: no ring of any length can deadlock. Sums go to staging memory, not to the network,
// so that a remote rank that is late holds up nobody's sums.
//
// reduce_scatter.cc says what moves, and when; reduce_scatter_sums.cc does the sums.
#pragma once

#include <string>
#include <vector>

#include "collectives/group.h"
#include "kernels/reduce.h"

namespace smddp {

class ReduceScatter final : public Fragment {
 public:
  using Fragment::Fragment;

  void start() override;
  // A missing partial sum may be the sender's fault or that of any rank behind it.
  bool can_blame() const override;
  bool progress(bool may_push) override;
  bool pushed() const override { return pushed_; }
  bool complete() const override;
  std::string waiting_for() const override;

 private:
  struct Cut {
    int at = 0;  // of the block in the order of the node
    Rank block = 0;
    size_t offset = 0;
    size_t bytes = 0;
  };

  // A block that this rank sums its node's contributions to.
  struct Share {
    struct Partial {  // what arrives for it from another node
      const ReceiveFlow* receive;
      size_t start;  // in the receive's run
      int node;
    };
    Rank block;
    size_t bytes;
    std::vector<Partial> partials;  // by node
    Staging node_sum;               // unrounded, where partials are to be added to it
    std::byte* out = nullptr;       // where the result waits to be sent on
    size_t summed = 0;              // bytes to which all of this node has contributed
    size_t combined = 0;            // bytes to which all partials have been added

    size_t done() const { return partials.empty() ? summed : combined; }
  };

  size_t to_wire(size_t bytes) const { return bytes / element_ * wire_element_; }
  size_t from_wire(size_t bytes) const { return bytes / wire_element_ * element_; }
  Rank reducer(Rank block) const { return pattern::reducer(group_.topology(), node_, block); }
  void make_flows();
  void add_share(Rank block) {
    share_of_[static_cast<size_t>(block)] = static_cast<int>(shares_.size());
    Share& s = shares_.emplace_back();
    s.block = block;
    s.bytes = part(operation_->input, block);
  }
  Share& share(Rank block) {
    return shares_[static_cast<size_t>(share_of_[static_cast<size_t>(block)])];
  }
  const Share& share(Rank block) const {
    return shares_[static_cast<size_t>(share_of_[static_cast<size_t>(block)])];
  }
  ShardRun run_of(const pattern::Flow& flow) const;
  // Where nothing is to be added to it, a block goes out of the input as it is.
  bool sent_from_input(SendFlow& send);
  void place(const ReceiveFlow& receive, size_t offset, const std::byte* payload,
             size_t bytes) override {
    kernels::copy(receive.memory + offset, payload, bytes, false);
  }
  bool send();
  size_t sendable(const SendFlow& send) const;
  // The next cut after `cut` (at -1: the first) among those this rank sums (`mine`) or its local peers
  // sum. The sequence runs over all blocks at one offset, those of other nodes first since they have
  // further to go, then on to the next offset. 0 bytes: end.
  Cut next(Cut cut, bool mine) const;
  bool push_one();
  // The memory behind a cut, where the peers are to read it there.
  std::vector<Extent> exposed(const Cut& cut) const;
  // Drops what others sum from the heads. True when every local peer's head is the wanted piece;
  // when nothing is wanted any more, when that dropped something.
  bool align_heads();
  bool sum_one();
  // Where a share's bytes from `at` on go once nothing is to be added to them, and how many lie there
  // end to end. 0 where they are not of the type that is summed.
  size_t result_run(const Share& s, size_t at, std::byte** to) const;
  // Sums `bytes` bytes of the sources, all of the operation's type, in one go.
  void fuse(const Share& s, std::byte* to, size_t bytes);
  // As much of the wanted piece from `at` on as lies end to end everywhere, summed in rank order in one
  // go. 0 where the sources can't be read in place, or their sum isn't the result.
  size_t fuse_node(size_t at, size_t limit);
  // Adds the node's contributions to the wanted piece in rank order.
  bool sum_node();
  const std::byte* peer_bytes(int i, size_t offset, size_t bytes);
  // The same for the partial sums of a share, in node order.
  size_t fuse_partials(const Share& s, size_t limit);
  // Adds the partial sums to what all of them cover by now.
  bool combine(Share& s);
  // Of a rank alone on its node and with nothing to add: the input is the sum.
  void pass_on(Share& s);
  // `count` elements of a share, from `offset` on, as far as this rank has to sum them: to where
  // they are sent from, or, of the own block, rounded once more into the output.
  void deliver(Share& s, size_t offset, std::byte* accumulator, size_t count);

  int node_ = 0;
  bool alone_ = false;  // on its node
  size_t element_ = 1, wire_element_ = 1;
  Dtype dtype_ = Dtype::kBytes, sum_type_ = Dtype::kBytes, wire_type_ = Dtype::kBytes;
  bool direct_ = false;     // peers read memory that is not shared, too
  bool streaming_ = false;  // results are written past the caches
  SmallVector<const void*, 16> sources_;
  size_t piece_bytes_ = 0;
  bool pushed_ = false;
  SmallVector<Rank, 16> order_;  // of the blocks, the same on all ranks of the node
  Cut next_to_push_, wanted_;
  std::vector<Share> shares_;      // the own block first
  SmallVector<int, 16> share_of_;  // by block, -1: a local peer's
  std::vector<Staging> staging_;
};

}  // namespace smddp
