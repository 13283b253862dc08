#include "collectives/reduce_scatter.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <utility>

namespace smddp {
namespace {

using intranode::Piece;

constexpr size_t kDirectPiece = 1 << 20;
// Below, a copy into the slot costs less than waiting for its readers.
constexpr size_t kSharedPiece = 8 << 10;
// Between nodes as many are pushed, and summed, before the network is looked at again: it idles while a
// rank sums all that its neighbours have pushed.
constexpr int kPiecesPerPass = 4;

}  // namespace

void ReduceScatter::start() {
  node_ = group_.topology().node_of(group_.rank());
  alone_ = group_.local_peers() == 0;
  dtype_ = operation_->dtype;
  sum_type_ = kernels::accumulator_of(dtype_);
  element_ = operation_->element_size;
  wire_type_ = (operation_->signature().options & kPartialsInFp32) != 0 ? sum_type_ : dtype_;
  wire_element_ = size_of(wire_type_);
  direct_ = read_directly(limit_, group_.shape()) && operation_->tensors <= intranode::kSlotExtents;
  streaming_ = streams();
  piece_bytes_ = direct_ ? kDirectPiece : intranode::kSlotBytes;
  for (int i = 1; i <= group_.topology().nodes(); ++i) {
    const auto& node = group_.topology().node((node_ + i) % group_.topology().nodes());
    for (Rank r : node) order_.push_back(r);
  }
  heard_.assign(static_cast<size_t>(group_.local_peers()), false);
  make_flows();
  pushed_ = alone_;
  if (!alone_) {
    next_to_push_ = next({.at = -1}, false);
    wanted_ = next({.at = -1}, true);
  }
  open_flows(operation_->plan().pattern == Pattern::kDirect);
}

bool ReduceScatter::can_blame() const {
  if (wanted_.bytes > 0 || flows_done()) return true;
  return std::any_of(send_flows_.begin(), send_flows_.end(),
                     [](const SendFlow& o) { return !o.cleared; });
}

bool ReduceScatter::progress(bool may_push) {
  bool moved = widen();
  int most = group_.topology().nodes() > 1 ? kPiecesPerPass : INT_MAX;
  auto push = [&] {
    for (int i = 0; i < most && may_push && !pushed_ && push_one(); ++i) moved = true;
  };
  push();
  for (int i = 0; i < most && !alone_ && sum_one(); ++i) {
    moved = true;
    if (exposes()) push();
  }
  for (Share& share : shares_) moved |= combine(share);
  return send() || moved;
}

bool ReduceScatter::complete() const {
  return pushed_ && wanted_.bytes == 0 && heard_all() &&
         shares_.front().done() == shares_.front().bytes && flows_done() &&
         (!exposes() || group_.outbox().read_by_all() >= exposed_until_);
}

std::string ReduceScatter::waiting_for() const {
  std::string names;
  auto name = [&](Rank rank) { names += (names.empty() ? "" : ", ") + group_.describe(rank); };
  for (int i = 0; i < group_.local_peers(); ++i) {
    const Piece* head = group_.inbox(i).head();
    if (!heard(i) && (head == nullptr || head->seq != seq_)) name(group_.local_peer(i));
  }
  if (!names.empty()) return "no data from " + names;
  for (const SendFlow& send : send_flows_) {
    if (!send.cleared) return group_.describe(send.target) + " has not started it";
  }
  for (const ReceiveFlow& receive : receive_flows_) {
    if (!receive.coverage.complete()) name(receive.source);
  }
  if (!names.empty()) return "no partial sums from " + names;
  for (const SendFlow& send : send_flows_) {
    if (!send.done()) return group_.describe(send.target) + " takes no data";
  }
  for (int i = 0; i < group_.local_peers(); ++i) {
    if (!heard(i) || group_.outbox().read_by(i) < group_.outbox().published()) {
      return group_.describe(group_.local_peer(i)) + " has not finished it";
    }
  }
  return "nothing";
}

void ReduceScatter::make_flows() {
  const Topology& topology = group_.topology();
  auto mirror = pattern::gather_flows(topology, group_.rank(), operation_->plan().pattern);
  share_of_.assign(static_cast<size_t>(group_.ranks()), -1);
  add_share(group_.rank());
  for (const pattern::Flow& flow : mirror.in) {
    for (Rank block : flow.shards) add_share(block);
  }
  for (const pattern::Flow& flow : mirror.out) {
    ReceiveFlow* receive = add_receive_flow(flow, run_of(flow));
    if (receive == nullptr) continue;
    staging_.push_back(group_.staging().take(receive->run.bytes()));
    receive->memory = staging_.back().data();
    for (size_t i = 0; i < receive->run.shards(); ++i) {
      share(receive->run.shard(i))
          .partials.push_back({receive, receive->run.start(i), topology.node_of(receive->source)});
    }
  }
  for (Share& s : shares_) {
    std::sort(s.partials.begin(), s.partials.end(),
              [](const auto& a, const auto& b) { return a.node < b.node; });
    if (!alone_ && !s.partials.empty() && s.bytes > 0)
      s.node_sum = group_.staging().take(s.bytes / element_ * size_of(sum_type_));
    // With nobody to add to it in this node, the input is the node's sum.
    if (alone_) s.summed = s.bytes;
  }
  for (const pattern::Flow& flow : mirror.in) {
    SendFlow* send = add_send_flow(flow, run_of(flow));
    if (send == nullptr || sent_from_input(*send)) continue;
    staging_.push_back(group_.staging().take(send->run.bytes()));
    send->memory = staging_.back().data();
    for (size_t i = 0; i < send->run.shards(); ++i) {
      share(send->run.shard(i)).out = staging_.back().data() + send->run.start(i);
    }
  }
  if (!alone_) return;
  for (Share& s : shares_) {
    if (s.partials.empty() && (s.out != nullptr || s.block == group_.rank())) pass_on(s);
  }
}

ShardRun ReduceScatter::run_of(const pattern::Flow& flow) const {
  ShardRun run;
  for (Rank block : flow.shards) run.add(block, to_wire(part(operation_->input, block)));
  return run;
}

bool ReduceScatter::sent_from_input(SendFlow& send) {
  if (!alone_ || wire_type_ != dtype_ || send.run.shards() != 1) return false;
  Rank block = send.run.shard(0);
  if (!share(block).partials.empty()) return false;
  std::byte* at = nullptr;
  if (operation_->input.contiguous(block, begin_, &at) >= send.run.bytes()) send.memory = at;
  return true;
}

bool ReduceScatter::send() {
  bool moved = false;
  for (SendFlow& send : send_flows_) {
    auto fill = [&](size_t offset, std::byte* to, size_t bytes) {
      operation_->input.read(send.run.shard(0), begin_ + offset, to, bytes);
    };
    while (send_one(send, sendable(send), fill)) moved = true;
  }
  return moved;
}

size_t ReduceScatter::sendable(const SendFlow& send) const {
  for (size_t i = 0; i < send.run.shards(); ++i) {
    size_t here = to_wire(share(send.run.shard(i)).done());
    if (here < send.run.length(i)) return send.run.start(i) + here;
  }
  return send.run.bytes();
}

ReduceScatter::Cut ReduceScatter::next(Cut cut, bool mine) const {
  size_t largest = std::min(
      limit_, operation_->input.largest() > begin_ ? operation_->input.largest() - begin_ : 0);
  for (;;) {
    if (++cut.at == group_.ranks()) {
      cut.at = 0;
      cut.offset += piece_bytes_;
    }
    if (cut.offset >= largest) return {};
    cut.block = order_[static_cast<size_t>(cut.at)];
    size_t size = part(operation_->input, cut.block);
    if (cut.offset >= size || (reducer(cut.block) == group_.rank()) != mine) continue;
    cut.bytes = std::min(piece_bytes_, size - cut.offset);
    return cut;
  }
}

bool ReduceScatter::push_one() {
  std::byte* slot = group_.outbox().next();
  if (slot == nullptr) return false;
  Piece piece;
  Cut cut = next_to_push_;
  if (cut.bytes > 0) {
    piece.shard = static_cast<uint32_t>(cut.block);
    piece.offset = cut.offset;
    piece.bytes = cut.bytes;
    std::vector<Extent> extents = exposed(cut);
    if (!extents.empty()) {
      std::memcpy(slot, extents.data(), extents.size() * sizeof(Extent));
      piece.extents = static_cast<uint32_t>(extents.size());
      exposed_until_ = group_.outbox().published() + 1;
    } else {
      group_.outbox().fill(cut.bytes, [&](bool streaming) {
        operation_->input.read(cut.block, begin_ + cut.offset, slot, cut.bytes, streaming);
      });
    }
    next_to_push_ = next(cut, false);
  }
  piece.last = next_to_push_.bytes == 0 ? 1 : 0;
  pushed_ = piece.last == 1;
  group_.push(*this, piece);
  return true;
}

std::vector<Extent> ReduceScatter::exposed(const Cut& cut) const {
  if (!direct_ && cut.bytes < kSharedPiece) return {};
  return readable(operation_->input, cut.block, begin_ + cut.offset, cut.bytes, direct_);
}

std::unique_ptr<Fragment> make_reduce_scatter(Group& group, std::shared_ptr<Operation> operation,
                                              uint64_t seq, size_t begin, size_t bytes) {
  return std::make_unique<ReduceScatter>(group, std::move(operation), seq, begin, bytes);
}

}  // namespace smddp
