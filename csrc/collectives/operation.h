// One collective call: what it works on, and how far it is. The caller fills it in; its Group carries
// it out.
#pragma once

#include <atomic>
#include <string>

#include "collectives/blocks.h"
#include "collectives/selector.h"
#include "common/clock.h"
#include "common/signature.h"
#include "flows/coding_choice.h"
#include "progress/task.h"
#include "recorder/flight_recorder.h"

namespace smddp {

// Bytes that a rank took from the other ranks of its host, by the way they came.
struct Taken {
  uint64_t slots = 0;        // copied into a slot by their owner, and out of it
  uint64_t in_place = 0;     // read where they lie, in memory that the owner shares
  uint64_t single_copy = 0;  // fetched out of the owner's own memory
};

// What a collective is, beside its memory: equal on all ranks.
struct OperationTerms {
  Collective collective = Collective::kBarrier;
  Dtype dtype = Dtype::kBytes;  // kBytes: of several types, or of one that is only moved, or none
  ReduceOp reduce_op = ReduceOp::kNone;
  int divisor = 0;          // of an average; 0: the number of ranks
  size_t element_size = 1;  // bytes; differs from size_of(dtype) only for kBytes
  uint32_t tensors = 1;
  uint64_t digest = 0;      // over the tensors' sizes; if it differs, all raise
  uint8_t options = 0;      // of its signature, beside those that follow from the plan
  uint64_t timeout_ns = 0;  // 0: the group's
};

class Operation : public Task, public OperationTerms {
 public:
  // AllGather: `input` is one block, `output` one per rank. ReduceScatter: the other way round.
  // AllReduce: equal parts, one per rank, of the input and of the output. Broadcast: as AllGather, with
  // no input, as the root's bytes are in its output; Reduce: as ReduceScatter. All-to-all, gather and
  // scatter: one block per rank of both, this rank's own of the same size in both. The memory must live, and
  // the input must not change, until the operation is closed.
  Blocks input, output;
  // The memory of an AllGather of `bytes` bytes of each of `ranks` ranks, this one's from `mine`, to `all`.
  void gather(void* mine, size_t bytes, std::byte* all, int ranks) {
    input.add(mine, bytes);
    input.end_block();
    for (int r = 0; r < ranks; ++r) {
      output.add(all + static_cast<size_t>(r) * bytes, bytes);
      output.end_block();
    }
  }
  Rank root = 0;  // of a gather, a scatter or a message
  int tag = 0;    // of a message
  // Whether `from` sends a block to `to`, if each pair of ranks has its own.
  bool sends(Rank from, Rank to) const {
    return collective == Collective::kAllToAll ||
           (collective == Collective::kGather || is_message(collective) ? to : from) == root;
  }
  // The blocks are memory of a device that is lent to the network: each block of an AllGather lies end to
  // end, this rank's own block is in place, and the group has one rank per host. No processor touches them.
  bool on_device = false;
  Coding coding = Coding::kOff;
  uint64_t called_ns = now_ns();
  // Since when a caller waits for it; 0: none has waited.
  std::atomic<uint64_t> waited_from_ns{0};

  // Valid once complete: how many fragments it took on the wire, the largest of them (bytes of all ranks'
  // blocks), the way the bytes went, and those that went to other hosts.
  uint32_t fragments = 0;
  uint64_t largest_fragment = 0;
  std::string path;
  Taken taken;
  SentBytes sent;

  int divisor_among(int ranks) const {
    return reduce_op != ReduceOp::kAvg ? 1 : divisor != 0 ? divisor : ranks;
  }
  // Valid once submitted.
  const Signature& signature() const { return signature_; }
  const Plan& plan() const { return plan_; }
  uint64_t number() const { return number_; }  // its place among the group's operations
  recorder::Mark record;
  uint64_t deadline_ns = 0;  // of the FailureDetector; 0: not set yet

 protected:
  void on_complete() override { record.end(now_ns(), status().ok()); }

 private:
  friend class Group;
  friend class FragmentMaker;
  Signature signature_;
  Plan plan_{};
  uint64_t number_ = 0;
  uint32_t fragments_left_ = 0;
};

// "recv from rank 2 (host b) of 4096 bytes, float32, tag 7, #3 of group 'g'". `peer`: what sentences call the other
// rank.
std::string describe_message(const Operation& operation, uint64_t number, const std::string& peer,
                             const std::string& group);
std::string has_not_called(const Operation& operation, const std::string& peer);

}  // namespace smddp
