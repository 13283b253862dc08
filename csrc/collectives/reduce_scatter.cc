#include "collectives/reduce_scatter.h"

#include <algorithm>
#include <climits>
#include <utility>

namespace smddp {
namespace {

using intranode::Piece;

// Between hosts a pass pushes, and sums, at most this many pieces before it looks at the network again: the
// network idles while a rank sums all that its local peers have pushed.
constexpr int kPiecesPerPass = 4;

}  // namespace

ReduceScatter::ReduceScatter(const FragmentContext& context, std::shared_ptr<Operation> operation,
                             uint64_t seq, size_t begin, size_t bytes,
                             std::shared_ptr<PartSums> part)
    : Fragment(context, std::move(operation), seq, begin, bytes, intranode::Lane::kSums),
      part_(std::move(part)),
      sums_(context.members.topology(), context.members.rank(), context.staging, *operation_, begin,
            bytes),
      pieces_(context.members.topology(), context.members.rank(), operation_->input, begin, bytes) {
}

void ReduceScatter::start() {
  alone_ = local_.count() == 0;
  own_position_ = members_.topology().local_index(members_.rank());
  direct_ = read_directly(limit_, shape_) && operation_->tensors <= intranode::kSlotExtents;
  expect_pieces();
  pieces_.start(direct_ ? kDirectPiece : intranode::kSlotBytes);
  sums_.start(streams());
  make_flows();
  pushed_ = alone_;
  if (!alone_) {
    next_to_push_ = pieces_.first(false);
    wanted_ = pieces_.first(true);
  }
  flows_.open(operation_->plan().pattern == Pattern::kDirect);
}

bool ReduceScatter::can_blame() const {
  if (wanted_.bytes > 0 || flows_.done()) return true;
  return std::any_of(flows_.sends().begin(), flows_.sends().end(),
                     [](const SendFlow& flow) { return !flow.cleared; });
}

bool ReduceScatter::progress(bool may_push) {
  bool moved = flows_.allow_more();
  int most = members_.topology().nodes() > 1 ? kPiecesPerPass : INT_MAX;
  auto push = [&] {
    for (int i = 0; i < most && may_push && !pushed_ && push_one(); ++i) moved = true;
  };
  push();
  for (int i = 0; i < most && !alone_ && sum_one(); ++i) {
    moved = true;
    if (exposes()) push();
  }
  moved |= sums_.combine();
  if (part_ != nullptr) part_->done = sums_.own().done();
  return send() || moved;
}

bool ReduceScatter::complete() const {
  return pushed_ && wanted_.bytes == 0 && heard_all() && sums_.own().done() == sums_.own().bytes &&
         flows_.done() && is_read();
}

std::string ReduceScatter::waiting_for() const {
  std::string names;
  auto name = [&](Rank rank) { names += (names.empty() ? "" : ", ") + members_.describe(rank); };
  for (int i = 0; i < local_.count(); ++i) {
    if (is_late(i)) name(local_.rank(i));
  }
  if (!names.empty()) return "no data from " + names;
  for (const SendFlow& flow : flows_.sends()) {
    if (!flow.cleared) return members_.describe(flow.target) + " has not started it";
  }
  for (const ReceiveFlow& flow : flows_.receives()) {
    if (!flow.coverage.complete()) name(flow.source);
  }
  if (!names.empty()) return "no partial sums from " + names;
  for (const SendFlow& flow : flows_.sends()) {
    if (!flow.done()) return members_.describe(flow.target) + " takes no data";
  }
  for (int i = 0; i < local_.count(); ++i) {
    if (needs(i)) {
      return members_.describe(local_.rank(i)) + " has not finished it";
    }
  }
  return "nothing";
}

// The flows of the pattern run backwards here: what an AllGather receives, a ReduceScatter sends.
void ReduceScatter::make_flows() {
  auto gather =
      pattern::gather_flows(members_.topology(), members_.rank(), operation_->plan().pattern);
  sums_.add(members_.rank());
  for (const pattern::Flow& flow : gather.in) {
    for (Rank block : flow.shards) sums_.add(block);
  }
  for (const pattern::Flow& flow : gather.out) {
    ReceiveFlow* partials = flows_.add_receive(flow, run_of(flow));
    if (partials != nullptr) sums_.receive(*partials);
  }
  sums_.prepare_host_sums();
  for (const pattern::Flow& flow : gather.in) {
    SendFlow* results = flows_.add_send(flow, run_of(flow));
    if (results != nullptr && results->run.shards() > 0) sums_.send(*results);
  }
  sums_.finish_unsummed();
}

ShardRun ReduceScatter::run_of(const pattern::Flow& flow) const {
  ShardRun run;
  for (Rank block : flow.shards) run.add(block, sums_.to_wire(part(operation_->input, block)));
  return run;
}

bool ReduceScatter::send() {
  bool moved = false;
  flows_.for_each_open_send([&](SendFlow& flow) {
    auto fill = [&](size_t offset, std::byte* to, size_t bytes) {
      operation_->input.read(flow.run.shard(0), begin_ + offset, to, bytes);
    };
    while (flows_.send_one(flow, sums_.sendable(flow), fill)) moved = true;
  });
  return moved;
}

std::unique_ptr<Fragment> make_reduce_scatter(const FragmentContext& context,
                                              std::shared_ptr<Operation> operation, uint64_t seq,
                                              size_t begin, size_t bytes,
                                              std::shared_ptr<PartSums> part) {
  return std::make_unique<ReduceScatter>(context, std::move(operation), seq, begin, bytes,
                                         std::move(part));
}

}  // namespace smddp
