// AllGather. Shards cross between hosts along the rails, in the flows of the selected pattern. Each rank
// pushes to its host what enters the host through it: first its own shard, then what arrives from the
// network, piece by piece, while later pieces are still in flight. Each byte enters a host once.
//
// The group makes it by make_allgather(). allgather.cc has the state machine and the flows between hosts,
// allgather_in_host.cc the pieces inside the host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/fragment.h"
#include "collectives/own_shard.h"

namespace smddp {

class AllGather final : public Fragment {
 public:
  AllGather(const FragmentContext& context, std::shared_ptr<Operation> operation, uint64_t seq,
            size_t begin, size_t bytes, std::shared_ptr<const PartSums> sums);

  void start() override;
  bool progress(bool may_push) override;
  bool pushed() const override { return pushed_; }
  bool complete() const override;
  std::string waiting_for() const override;

 private:
  // What this rank pushes to its host: a shard, and where it comes from.
  struct Source {
    Rank shard;
    const ReceiveFlow* flow;  // nullptr: the own shard, here from the start
    size_t start;             // of the shard, in the flow's run
    size_t pushed;
  };
  // The next bytes of a source.
  struct NextPiece {
    Source* source = nullptr;  // nullptr: nothing can be pushed yet
    size_t bytes = 0;
    std::vector<Extent> extents;  // to be read by the peers; empty: the bytes go into the slot
  };

  // --- flows between hosts.

  void make_flows();
  // How much of this rank's shard is there to be passed on, from its start.
  size_t own_here() const { return sums_ == nullptr ? own_.bytes() : sums_->done; }
  ShardRun run_of(const pattern::Flow& flow) const;
  // Where a run lies end to end, or nullptr.
  std::byte* memory_of(const ShardRun& run) const;
  bool send();
  // How much of a flow's run is here, from its start. A shard that is passed on has come in one flow, not
  // always the same, or from a local peer.
  size_t sendable(SendFlow& flow) const;
  size_t arrived(Rank shard) const;  // by a flow

  // --- pieces inside the host.

  void add_source(Rank shard, const ReceiveFlow* flow, size_t start);
  // The rank of this host that pushes `shard`: its owner, or the rank that receives it from another host.
  Rank pusher(Rank shard) const;
  uint64_t expected_from(int i) const override;
  size_t available(const Source& source) const;
  bool push_one();
  NextPiece next_piece();
  // The memory behind the next `bytes` bytes of a source if the peers are to read it there, else nothing.
  std::vector<Extent> exposed(const Source& source, size_t bytes) const;
  bool take_in(int i, const intranode::Piece& head);
  bool fits(const intranode::Piece& head) const;

  // How much of another rank's shard is in the output, from its start.
  size_t here(Rank shard) const {
    return pusher(shard) == members_.rank() ? arrived(shard)
                                            : received_[static_cast<size_t>(shard)];
  }
  void read(Rank shard, size_t offset, std::byte* to, size_t bytes, bool streaming = false) const;

  const std::shared_ptr<const PartSums> sums_;  // of an AllReduce
  OwnShard own_;
  bool direct_ = false;  // peers read memory that is not shared, too
  bool streaming_ = false;
  bool pushed_ = false;
  // By shard, where it arrives; only of a pattern that passes shards on.
  struct Arrival {
    const ReceiveFlow* flow = nullptr;
    size_t start = 0, length = 0;
  };
  std::vector<Arrival> arrivals_;
  SmallVector<Source, 2> sources_;
  size_t first_source_ = 0;           // those before it are pushed
  size_t to_push_ = 0;                // bytes, of all sources
  SmallVector<size_t, 16> received_;  // bytes that local peers have pushed, by shard
  size_t missing_ = 0;                // bytes that they have yet to push
};

}  // namespace smddp
