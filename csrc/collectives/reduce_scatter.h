// ReduceScatter, the mirror of AllGather. Inside a host each block is summed by one rank: its owner, or the
// owner's gateway on this host. A gateway sends its host's partial sum towards the owner along the rail, in
// the mirrored flows of the selected pattern. The rank that receives partial sums adds them in host order
// (BlockSums). The contributions of a host are added in rank order. Both orders are fixed, so results do
// not depend on timing.
//
// All ranks of a host cut all blocks into the same sequence of pieces (PieceSequence). Each rank pushes
// those that other ranks sum. It sums its own pieces one by one, once the head of every local peer's
// outbox is the wanted piece. The first piece of the sequence that is not summed yet is always at the head
// of every outbox or about to be, so there is no deadlock, however few slots an outbox has. Sums go to
// staging memory, not to the network, so a remote rank that is late delays no sum on this host.
//
// The group makes it by make_reduce_scatter(). reduce_scatter.cc has the state machine and the flows
// between hosts, reduce_scatter_in_host.cc the pieces inside the host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/block_sums.h"
#include "collectives/fragment.h"
#include "collectives/piece_sequence.h"
#include "kernels/reduce.h"

namespace smddp {

class ReduceScatter final : public Fragment {
 public:
  ReduceScatter(const FragmentContext& context, std::shared_ptr<Operation> operation, uint64_t seq,
                size_t begin, size_t bytes, std::shared_ptr<PartSums> part);

  void start() override;
  // False while only flows are unfinished that have started: a missing partial sum may be the fault of the
  // sender or of any rank behind it.
  bool can_blame() const override;
  bool progress(bool may_push) override;
  bool pushed() const override { return pushed_; }
  bool complete() const override;
  std::string waiting_for() const override;

 private:
  // --- flows between hosts.

  void make_flows();
  ShardRun run_of(const pattern::Flow& flow) const;
  bool send();
  void place(const ReceiveFlow& flow, size_t offset, const std::byte* payload,
             size_t bytes) override {
    kernels::copy(flow.memory + offset, payload, bytes, false);
  }

  // --- pieces inside the host.

  bool push_one();
  // The memory behind a piece if the local peers are to read it there, else nothing.
  std::vector<Extent> exposed(const BlockPiece& piece) const;
  // Drops pieces that other ranks sum from the heads of the inboxes. True if every local peer's head is the
  // wanted piece; if no piece is wanted any more, true if that dropped something.
  bool align_heads();
  bool sum_one();
  // Adds the host's contributions to the wanted piece in rank order. False if a peer's could not be read.
  bool sum_wanted();
  // As much of the next `limit` bytes of the wanted piece as lies end to end everywhere, in one pass,
  // straight into the result. 0 if the sources can't be read in place, or if their sum isn't the result.
  size_t sum_in_one_pass(size_t at, size_t limit);
  // Bytes of the piece at the head of inbox i, where they lie or fetched; nullptr: the group has failed.
  const std::byte* peer_bytes(int i, size_t offset, size_t bytes);
  // The inbox of the rank at `position` among the ranks of the host, which is not own_position_.
  int inbox_at(int position) const { return position < own_position_ ? position : position - 1; }

  const std::shared_ptr<PartSums> part_;  // of an AllReduce
  BlockSums sums_;
  PieceSequence pieces_;
  bool alone_ = false;    // on its host
  int own_position_ = 0;  // among the ranks of the host
  bool direct_ = false;   // peers read memory that is not shared, too
  bool pushed_ = false;
  BlockPiece next_to_push_, wanted_;
  BlockSums::Sources sources_;
};

}  // namespace smddp
