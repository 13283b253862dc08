#include "collectives/allgather.h"

#include <algorithm>
#include <utility>

namespace smddp {

using intranode::Piece;

AllGather::AllGather(const FragmentContext& context, std::shared_ptr<Operation> operation,
                     uint64_t seq, size_t begin, size_t bytes, std::shared_ptr<const PartSums> sums)
    : Fragment(context, std::move(operation), seq, begin, bytes, intranode::Lane::kGathers,
               sums != nullptr),
      sums_(std::move(sums)),
      own_(*operation_, context.members.rank(), begin, bytes) {}

void AllGather::start() {
  Rank me = members_.rank();
  direct_ = read_directly(limit_, shape_);
  streaming_ = streams();
  expect_pieces();
  received_.assign(static_cast<size_t>(members_.ranks()), 0);
  own_.start(streaming_);
  make_flows();
  add_source(me, nullptr, 0);
  for (const ReceiveFlow& flow : flows_.receives()) {
    for (size_t i = 0; i < flow.run.shards(); ++i) {
      add_source(flow.run.shard(i), &flow, flow.run.start(i));
    }
  }
  for (Rank shard = 0; shard < members_.ranks(); ++shard) {
    if (pusher(shard) != me) missing_ += part(operation_->output, shard);
  }
  pushed_ = local_.count() == 0;
  flows_.open(operation_->plan().pattern != Pattern::kLog);
}

bool AllGather::progress(bool may_push) {
  bool moved = flows_.allow_more();
  moved |= send();
  auto push = [&] {
    while (may_push && !pushed_ && push_one()) moved = true;
  };
  push();
  for (int i = 0; i < local_.count(); ++i) {
    while (const Piece* head = inbox_head(i)) {
      moved = true;
      if (!take_in(i, *head)) return true;
      if (exposes()) push();
    }
  }
  // Last: the network and the local peers read the input, so none of them waits for this copy.
  return moved || own_.copy_some();
}

bool AllGather::complete() const {
  return pushed_ && missing_ == 0 && own_.copied() == own_.bytes() && heard_all() &&
         flows_.done() && is_read();
}

std::string AllGather::waiting_for() const {
  std::string names;
  auto name = [&](Rank rank) { names += (names.empty() ? "" : ", ") + members_.describe(rank); };
  for (Rank shard = 0; shard < members_.ranks(); ++shard) {
    if (shard == members_.rank()) continue;
    if (here(shard) < part(operation_->output, shard)) name(shard);
  }
  if (!names.empty()) return "no data from " + names;
  return waiting_for_takers();
}

uint64_t AllGather::expected_from(int i) const {
  uint64_t bytes = 0;
  for (Rank shard = 0; shard < members_.ranks(); ++shard) {
    if (pusher(shard) == local_.rank(i)) bytes += part(operation_->output, shard);
  }
  return bytes;
}

void AllGather::make_flows() {
  auto gather =
      pattern::gather_flows(members_.topology(), members_.rank(), operation_->plan().pattern);
  bool passes_on = operation_->plan().pattern == Pattern::kLog;
  if (passes_on) arrivals_.resize(static_cast<size_t>(members_.ranks()));
  for (const pattern::Flow& flow : gather.in) {
    ReceiveFlow* shards = flows_.add_receive(flow, run_of(flow));
    if (shards == nullptr) continue;
    shards->memory = memory_of(shards->run);
    if (passes_on) {
      for (size_t i = 0; i < shards->run.shards(); ++i)
        arrivals_[static_cast<size_t>(shards->run.shard(i))] = {shards, shards->run.start(i),
                                                                shards->run.length(i)};
    }
  }
  for (const pattern::Flow& flow : gather.out) {
    SendFlow* shards = flows_.add_send(flow, run_of(flow));
    if (shards != nullptr) shards->memory = memory_of(shards->run);
  }
}

ShardRun AllGather::run_of(const pattern::Flow& flow) const {
  ShardRun run;
  for (Rank shard : flow.shards) {
    size_t bytes = part(operation_->output, shard);
    if (bytes > 0) run.add(shard, bytes);
  }
  return run;
}

std::byte* AllGather::memory_of(const ShardRun& run) const {
  std::byte* at = nullptr;
  if (run.shards() != 1) return nullptr;
  Rank shard = run.shard(0);
  size_t length = shard == members_.rank() ? own_.blocks().contiguous(own_.block(), begin_, &at)
                                           : operation_->output.contiguous(shard, begin_, &at);
  return length >= run.bytes() ? at : nullptr;
}

bool AllGather::send() {
  bool moved = false;
  flows_.for_each_open_send([&](SendFlow& flow) {
    auto fill = [&](size_t offset, std::byte* to, size_t bytes) {
      flow.run.for_each(offset, bytes, [&](Rank shard, size_t at, size_t n, size_t from) {
        read(shard, at, to + from, n);
      });
    };
    while (flows_.send_one(flow, sendable(flow), fill)) moved = true;
  });
  return moved;
}

// Shards become whole in any order, but never less so: a look goes on where the last one ended.
size_t AllGather::sendable(SendFlow& flow) const {
  for (size_t& i = flow.whole_shards; i < flow.run.shards(); ++i) {
    Rank shard = flow.run.shard(i);
    size_t bytes = shard == members_.rank() ? own_here() : here(shard);
    if (bytes < flow.run.length(i)) return flow.run.start(i) + bytes;
  }
  return flow.run.bytes();
}

size_t AllGather::arrived(Rank shard) const {
  if (!arrivals_.empty()) {
    const Arrival& arrival = arrivals_[static_cast<size_t>(shard)];
    if (arrival.flow == nullptr) return 0;
    return std::min(arrival.length, arrival.flow->arrived_from(arrival.start));
  }
  for (const ReceiveFlow& flow : flows_.receives()) {
    for (size_t i = 0; i < flow.run.shards(); ++i) {
      if (flow.run.shard(i) != shard) continue;
      return std::min(flow.run.length(i), flow.arrived_from(flow.run.start(i)));
    }
  }
  return 0;
}

void AllGather::read(Rank shard, size_t offset, std::byte* to, size_t bytes, bool streaming) const {
  if (shard == members_.rank()) {
    own_.read(offset, to, bytes, streaming);
  } else {
    operation_->output.read(shard, begin_ + offset, to, bytes, streaming);
  }
}

std::unique_ptr<Fragment> make_allgather(const FragmentContext& context,
                                         std::shared_ptr<Operation> operation, uint64_t seq,
                                         size_t begin, size_t bytes,
                                         std::shared_ptr<const PartSums> sums) {
  return std::make_unique<AllGather>(context, std::move(operation), seq, begin, bytes,
                                     std::move(sums));
}

}  // namespace smddp
