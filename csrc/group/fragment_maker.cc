#include "group/fragment_maker.h"

#include <algorithm>
#include <utility>

namespace smddp {
namespace {

// Shards of a list of at least this size get fragments of their own: copied twice, they would cost more
// than the messages of a fragment do. 64 tensors, 39.7 MiB together, took 299 ms for 515 on 4 x 1 (2026-11-21, AMD EPYC).
// 32 KiB to 1 MiB: the same within 1 % (2026-11-29-constants).
constexpr size_t kOwnFragment = 128 << 10;

// What a fragment from `begin` on, of at most `limit` bytes of each block, adds to its operation's
// figures.
void count_fragment(Operation& op, const Blocks& blocks, int ranks, size_t begin, size_t limit) {
  ++op.fragments;
  size_t bytes = 0;
  for (Rank r = 0; r < ranks; ++r) {
    bytes += std::min(limit, std::max(blocks.bytes(r), begin) - begin);
  }
  op.largest_fragment = std::max<uint64_t>(op.largest_fragment, bytes);
}

}  // namespace

std::string FragmentMaker::path_of(const Operation& op) const {
  std::string path;
  if (shape_.ranks == 1) {
    path = "copy";
  } else if (context_.local.count() > 0) {
    path = read_directly(op.collective, op.plan().fragment_bytes, shape_) ? "single-copy" : "shm";
  }
  if (shape_.nodes > 1) path += path.empty() ? "fabric" : " + fabric";
  if (op.plan().pattern != Pattern::kDirect)
    path += std::string(" (") + pattern::name_of(op.plan().pattern) + ")";
  return path;
}

void FragmentMaker::enqueue(const std::shared_ptr<Operation>& operation) {
  Operation& op = *operation;
  if (takes_slots(op)) {
    enqueue(operation, SlotExchange(context_, op));
  } else if (op.plan_.whole || pairwise(op.collective)) {
    auto make = op.plan_.whole ? make_allreduce : make_all_to_all;
    queue_.add(make(context_, operation, queue_.next_seq()));
    op.fragments_left_ = 1;
  } else if (sums(op.collective)) {
    enqueue_sums(operation);
  } else {
    enqueue_gathers(operation);
  }
}

void FragmentMaker::enqueue(const std::shared_ptr<Operation>& operation, SlotExchange begun) {
  queue_.add(make_slot_exchange(context_, operation, queue_.next_seq(), std::move(begun)));
  operation->fragments_left_ = 1;
}

void FragmentMaker::plan(Operation& op, const Tuning& tuning) const {
  bool pairs = pairwise(op.collective);
  auto total = [&](const Blocks& blocks) {
    size_t bytes = 0;
    for (Rank r = 0; r < shape_.ranks; ++r) bytes += blocks.bytes(r);
    return bytes;
  };
  const Blocks& blocks = sums(op.collective) ? op.input : op.output;
  Tuning chosen = tuning;
  if (chosen.algorithm == Algorithm::kAuto) chosen.algorithm = algorithm_;
  size_t largest = pairs ? std::max(op.input.largest(), op.output.largest()) : blocks.largest();
  op.plan_ = select({op.collective, largest, op.element_size, op.dtype}, shape_, chosen);
  op.coding = tuning.coding;
  int options = op.options | pattern::signature_option(op.plan_.pattern);
  if (sums(op.collective) && tuning.reduce_precision_fp32) options |= kPartialsInFp32;
  op.signature_ = {is_message(op.collective) ? Collective::kSend : op.collective,
                   op.dtype,
                   op.reduce_op,
                   static_cast<uint8_t>(options),
                   op.tensors,
                   pairs ? std::max(total(op.input), total(op.output)) : total(blocks),
                   pairs ? 0 : op.plan_.fragment_bytes,
                   op.digest};
  if (op.plan_.whole || pairs) {
    op.fragments = 1;
    op.largest_fragment = op.signature_.bytes;
  }
}

void FragmentMaker::enqueue_gathers(const std::shared_ptr<Operation>& operation) {
  Operation& op = *operation;
  const Blocks& blocks = op.output;
  // Between hosts, memory that lies end to end goes straight from memory to memory, if the fragment
  // holds nothing else: large tensors of a list get fragments of their own.
  bool apart = op.tensors > 1 && shape_.nodes > 1 &&
               op.signature_.bytes == blocks.largest() * static_cast<size_t>(shape_.ranks);
  size_t step = op.plan_.fragment_bytes;
  for (size_t begin = 0; begin == 0 || begin < blocks.largest(); begin += step) {
    if (apart && begin < blocks.largest())
      step = std::min(op.plan_.fragment_bytes, blocks.stretch(0, begin, kOwnFragment));
    queue_.add(make_allgather(context_, operation, queue_.next_seq(), begin, step));
    count_fragment(op, blocks, shape_.ranks, begin, step);
  }
  op.fragments_left_ = op.fragments;
}

void FragmentMaker::enqueue_sums(const std::shared_ptr<Operation>& operation) {
  Operation& op = *operation;
  bool gathers = op.collective == Collective::kAllReduce;
  size_t step = op.plan_.fragment_bytes;
  // The part whose sums were enqueued last, if it is still to be gathered.
  size_t summed_begin = 0;
  std::shared_ptr<PartSums> summed;
  auto gather = [&] {
    if (summed == nullptr) return;
    queue_.add(make_allgather(context_, operation, queue_.next_seq(), summed_begin, step, summed));
  };
  for (size_t begin = 0; begin == 0 || begin < op.input.largest(); begin += step) {
    std::shared_ptr<PartSums> sums = gathers ? std::make_shared<PartSums>() : nullptr;
    queue_.add(make_reduce_scatter(context_, operation, queue_.next_seq(), begin, step, sums));
    // A part is gathered behind the next part's sums, so that the rails never idle between.
    gather();
    summed = std::move(sums);
    summed_begin = begin;
    count_fragment(op, op.input, shape_.ranks, begin, step);
  }
  gather();
  op.fragments_left_ = gathers ? 2 * op.fragments : op.fragments;
}

}  // namespace smddp
