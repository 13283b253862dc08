// What a ReduceScatter sums between hosts: for each block that this rank sums for its host, the host's sum,
// the partial sums that arrive from other hosts, and the place of the result. A result is the output, or
// the memory from which a partial sum is sent on towards the block's owner.
//
// Partial sums are added in host order, the own host's among them, as far as all have arrived. The order
// is fixed, so results do not depend on timing.
//
// It must not know how contributions move inside the host, nor when flows send. ReduceScatter sets it up,
// gives it the sums of the host and asks it what flows may send.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/operation.h"
#include "common/small_vector.h"
#include "common/staging.h"
#include "flows/flow.h"
#include "topology/topology.h"

namespace smddp {

// A block that this rank sums its host's contributions to.
struct BlockSum {
  struct Partial {  // what arrives for it from another host
    const ReceiveFlow* flow;
    size_t start;  // in the flow's run
    int host;
  };
  Rank block;
  size_t bytes;
  std::vector<Partial> partials;  // by host
  size_t own_position = 0;        // of the own host's sum among those of all hosts
  Staging host_sum;               // unrounded, if partials are to be added to it
  std::byte* out = nullptr;       // from where the result is sent on
  size_t summed = 0;              // bytes to which all of this host has contributed
  size_t combined = 0;            // bytes to which all partials have been added
  size_t least = 0;               // the partial of which fewest bytes were here at the last look

  size_t here() const { return partials.empty() ? summed : combined; }
  // The partial at `position` among the sums of all hosts, which is not own_position.
  const Partial& partial_at(size_t position) const {
    return partials[position < own_position ? position : position - 1];
  }
};

class BlockSums {
 public:
  using Sources = SmallVector<const void*, 16>;
  // Elements of one type; nullptr: they could not be read.
  struct Source {
    const std::byte* address;
    Dtype type;
  };

  // Sums bytes [begin, begin + limit) of the blocks of `operation`.
  BlockSums(const Topology& topology, Rank rank, StagingPool& pool, const Operation& operation,
            size_t begin, size_t limit)
      : topology_(topology),
        rank_(rank),
        host_(topology.node_of(rank)),
        alone_(topology.node(host_).size() == 1),
        pool_(pool),
        operation_(operation),
        begin_(begin),
        limit_(limit) {}

  // --- set-up: the functions below are called once each, or once per block or flow, in this order.

  // `streaming`: results are written past the caches.
  void start(bool streaming);
  void add(Rank block);
  // Gives the flow memory for the partial sums of its blocks.
  void receive(ReceiveFlow& flow);
  void prepare_host_sums();
  // Gives the flow the memory that its results will be in.
  void send(SendFlow& flow);
  // For a rank alone on its host: results of blocks that nothing has to be added to.
  void finish_unsummed();

  // --- the sums of the host.

  BlockSum& of(Rank block) {
    return sums_[static_cast<size_t>(index_of_[static_cast<size_t>(block)])];
  }
  const BlockSum& of(Rank block) const {
    return sums_[static_cast<size_t>(index_of_[static_cast<size_t>(block)])];
  }
  const BlockSum& own() const { return sums_.front(); }

  // The most elements that one call of accumulate() takes: accumulator and one source stay in L2.
  static constexpr size_t kElements = 16 << 10;
  // Adds up `count` elements of each of `sources` sources, in their order: source(k) returns the k-th.
  // Returns the accumulator, which lasts until this thread's next call, or nullptr if a source could not be
  // read.
  template <class F>
  std::byte* accumulate(size_t sources, size_t count, F&& source) const {
    std::byte* sum = accumulator();
    for (size_t k = 0; k < sources; ++k) {
      Source next = source(k);
      if (next.address == nullptr) return nullptr;
      if (k == 0) {
        kernels::load(sum, next.address, count, next.type);
      } else {
        kernels::accumulate(sum, next.address, count, next.type, operation_.reduce_op);
      }
    }
    return sum;
  }
  // Takes `count` elements from byte `at` on, summed over this host. Does not change `sum.summed`.
  void put_host_sum(BlockSum& sum, size_t at, std::byte* accumulator, size_t count);
  // Where the result's bytes from `at` on go, and how many of them lie there end to end. 0 if they are not
  // of the type that is summed.
  size_t result_run(const BlockSum& sum, size_t at, std::byte** to) const;
  // Reduces `bytes` bytes of the sources, all of the operation's type, to a result in one pass.
  void reduce(const BlockSum& sum, std::byte* to, size_t bytes, const Sources& sources) const;

  // --- between hosts.

  // Adds the partial sums to what all of them cover by now. True if that was more than before.
  bool combine();
  // How much of a flow's run is there to be sent, from its start.
  size_t sendable(const SendFlow& flow) const;
  size_t to_wire(size_t bytes) const { return bytes / element_ * wire_element_; }

 private:
  size_t from_wire(size_t bytes) const { return bytes / wire_element_ * element_; }
  size_t to_sum(size_t bytes) const { return bytes / element_ * size_of(sum_type_); }
  static std::byte* accumulator();
  // The block of the output that holds this rank's result.
  Rank output_block() const { return operation_.collective == Collective::kAllReduce ? rank_ : 0; }
  // True if nothing is to be added to the flow's block, which then goes out of the input as it is.
  bool sent_from_input(SendFlow& flow) const;
  bool combine(BlockSum& sum);
  // As much of the next `limit` bytes as lies end to end everywhere, in one pass. 0 if the types differ.
  size_t combine_in_one_pass(const BlockSum& sum, size_t limit);
  // `count` elements from byte `at` on, as far as this rank has to sum them: to where they are sent from,
  // or, of the own block, rounded once more into the output.
  void deliver(const BlockSum& sum, size_t at, std::byte* accumulator, size_t count) const;

  const Topology& topology_;
  const Rank rank_;
  const int host_;
  const bool alone_;  // on its host
  StagingPool& pool_;
  const Operation& operation_;
  const size_t begin_;
  const size_t limit_;

  size_t element_ = 1, wire_element_ = 1;
  Dtype dtype_ = Dtype::kBytes, sum_type_ = Dtype::kBytes, wire_type_ = Dtype::kBytes;
  bool streaming_ = false;
  Sources sources_;
  std::vector<BlockSum> sums_;  // the own block first
  std::vector<BlockSum*> with_partials_;
  SmallVector<int, 16> index_of_;  // by block; -1: a local peer sums it
  std::vector<Staging> staging_;   // of flows
};

}  // namespace smddp
