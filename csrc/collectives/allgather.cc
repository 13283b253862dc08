// AllGather. Every rank sends its shard straight to its gateway on each other node, all-to-all
// along the rails, and pushes to its node what it has: the own shard first, then each shard as it
// lands from the network, while later ones are still in flight. n-1 messages per rank between
// nodes, one hop, and each byte enters a node once.
#include <deque>

#include "collectives/communicator.h"
#include "schedule/pattern.h"

namespace smddp {
namespace {

using intranode::Piece;

constexpr size_t kDirectPiece = 1 << 20;

class AllGather final : public Round {
 public:
  using Round::Round;

  void start() override {
    int ranks = group_.ranks();
    Rank me = group_.rank();
    const Blocks& output = operation_->output;
    direct_ =
        read_directly(limit_, group_.shape()) && operation_->tensors <= intranode::kSlotExtents;
    heard_.assign(static_cast<size_t>(group_.local_peers()), false);
    received_.assign(static_cast<size_t>(ranks), 0);
    for (Rank r = 0; r < ranks; ++r) missing_ += part(output, r);
    copy_own();
    received(me, part(output, me));
    expected_ = 0;
    for (Rank source : pattern::arrivals(group_.topology(), me)) {
      if (part(output, source) == 0) continue;
      ++expected_;
    }
    announce();
    if (part(output, me) > 0) {
      to_push_.push_back(me);
      for (Rank target : pattern::targets(group_.topology(), me))
        targets_.push_back({target, false, 0});
    }
    nothing_to_push_ = to_push_.empty() && expected_ == 0;
    if (group_.local_peers() == 0) pushed_ = true;
  }

  void announce() override {
    for (Rank source : pattern::arrivals(group_.topology(), group_.rank())) {
      if (received_[static_cast<size_t>(source)] < part(operation_->output, source)) {
        group_.send_ready(*this, source);
      }
    }
  }

  bool progress(bool may_push) override {
    bool moved = false;
    while (may_push && !pushed_ && push_one()) moved = true;
    for (int i = 0; i < group_.local_peers(); ++i) {
      while (const Piece* head = group_.head(i, *this)) {
        moved = true;
        if (!take_in(i, *head)) return true;
      }
    }
    return send() || moved;
  }

  bool pushed() const override { return pushed_; }

  bool complete() const override {
    return pushed_ && missing_ == 0 && sent_ == targets_.size() && heard_all() &&
           (exposed_until_ == 0 || group_.outbox().read_by_all() >= exposed_until_);
  }

  void on_ready(Rank source) override {
    for (Target& target : targets_) {
      if (target.rank == source) target.ready = true;
    }
  }

  Status on_data(const wire::Header& header, const std::byte* payload) override {
    auto shard = static_cast<Rank>(header.shard);
    const Topology& topology = group_.topology();
    if (header.source != header.shard || topology.same_node(shard, group_.rank()) ||
        topology.gateway(shard, topology.node_of(group_.rank())) != group_.rank() ||
        !fits(shard, header.offset, header.bytes)) {
      return {Code::kMismatch, group_.describe(static_cast<Rank>(header.source)) +
                                   " sent data that is not part of this all_gather"};
    }
    operation_->output.write(shard, begin_ + header.offset, payload, header.bytes);
    received(shard, header.bytes);
    if (received_[header.shard] == part(operation_->output, shard)) {
      --expected_;
      to_push_.push_back(shard);
    }
    return {};
  }

  std::string waiting_for() const override {
    std::string names;
    for (Rank r = 0; r < group_.ranks(); ++r) {
      if (received_[static_cast<size_t>(r)] == part(operation_->output, r)) continue;
      names += (names.empty() ? "" : ", ") + group_.describe(r);
    }
    if (!names.empty()) return "no data from " + names;
    for (const Target& target : targets_) {
      if (target.sent < part(operation_->output, group_.rank()))
        return group_.describe(target.rank) + " takes no data";
    }
    for (int i = 0; i < group_.local_peers(); ++i) {
      if (!heard(i) || group_.outbox().read_by(i) < exposed_until_) {
        return group_.describe(group_.local_peer(i)) + " has not finished it";
      }
    }
    return "nothing";
  }

 private:
  struct Target {
    Rank rank;
    bool ready;
    size_t sent;
  };

  bool fits(Rank shard, uint64_t offset, uint64_t bytes) const {
    size_t size = part(operation_->output, shard);
    return offset <= size && bytes <= size - offset &&
           bytes <= size - received_[static_cast<size_t>(shard)];
  }

  void received(Rank shard, size_t bytes) {
    received_[static_cast<size_t>(shard)] += bytes;
    missing_ -= bytes;
  }

  // AllReduce gathers in place: its sums already lie in their block of the output.
  void copy_own() {
    if (operation_->collective == Collective::kAllReduce) return;
    Rank me = group_.rank();
    size_t bytes = part(operation_->output, me);
    for (size_t done = 0; done < bytes;) {
      std::byte *from = nullptr, *to = nullptr;
      size_t n = std::min(operation_->input.contiguous(0, begin_ + done, &from),
                          operation_->output.contiguous(me, begin_ + done, &to));
      n = std::min(n, bytes - done);
      if (from != to) std::memcpy(to, from, n);
      done += n;
    }
  }

  bool push_one() {
    if (to_push_.empty() && !nothing_to_push_) return false;  // more will land
    std::byte* slot = group_.outbox().next();
    if (slot == nullptr) return false;
    Piece piece;
    if (nothing_to_push_) {
      piece.last = 1;
    } else {
      Rank shard = to_push_.front();
      size_t left = part(operation_->output, shard) - push_offset_;
      piece.shard = static_cast<uint32_t>(shard);
      piece.offset = push_offset_;
      piece.bytes = std::min(left, direct_ ? kDirectPiece : intranode::kSlotBytes);
      size_t at = begin_ + push_offset_;
      if (direct_) {
        std::vector<Extent> extents = operation_->output.slice(shard, at, piece.bytes);
        std::memcpy(slot, extents.data(), extents.size() * sizeof(Extent));
        piece.extents = static_cast<uint32_t>(extents.size());
        exposed_until_ = group_.outbox().published() + 1;
      } else {
        operation_->output.read(shard, at, slot, piece.bytes);
      }
      push_offset_ += piece.bytes;
      if (piece.bytes == left) {
        to_push_.pop_front();
        push_offset_ = 0;
      }
      piece.last = to_push_.empty() && expected_ == 0 ? 1 : 0;
    }
    pushed_ = piece.last == 1;
    group_.push(*this, piece);
    return true;
  }

  bool take_in(int i, const Piece& head) {
    if (head.bytes > 0) {
      auto shard = static_cast<Rank>(head.shard);
      if (shard < 0 || shard >= group_.ranks() || !fits(shard, head.offset, head.bytes)) {
        group_.fail({Code::kInternal,
                     group_.describe(group_.local_peer(i)) + " pushed a piece out of bounds"});
        return false;
      }
      size_t at = begin_ + head.offset;
      intranode::Inbox& inbox = group_.inbox(i);
      if (head.extents > 0) {
        std::vector<Extent> to = operation_->output.slice(shard, at, head.bytes);
        Status read = intranode::single_copy_read(inbox.pid(), inbox.extents(), head.extents, 0,
                                                  head.bytes, to.data(), to.size());
        if (!read) {
          group_.fail_read(i, *this, read);
          return false;
        }
      } else {
        operation_->output.write(shard, at, inbox.bytes(), head.bytes);
      }
      received(shard, head.bytes);
    }
    take(i, head);
    return true;
  }

  bool send() {
    bool moved = false, again = true;
    size_t bytes = part(operation_->output, group_.rank());
    while (again) {  // one message to each in turn, so that no rail waits for another's last byte
      again = false;
      for (Target& target : targets_) {
        if (!target.ready || target.sent == bytes) continue;
        fabric::SendBuffer* buffer = group_.acquire(target.rank);
        if (buffer == nullptr) continue;
        size_t n = std::min(bytes - target.sent, group_.max_payload());
        operation_->output.read(group_.rank(), begin_ + target.sent, Communicator::payload(buffer),
                                n);
        group_.send_data(*this, buffer, group_.rank(), target.sent, n);
        target.sent += n;
        if (target.sent == bytes) ++sent_;
        again = moved = true;
      }
    }
    return moved;
  }

  bool direct_ = false;
  bool pushed_ = false;
  bool nothing_to_push_ = false;
  std::deque<Rank> to_push_;  // shards that are here and whole
  size_t push_offset_ = 0;    // into the first of them
  size_t expected_ = 0;       // shards still to land from the network
  std::vector<Target> targets_;
  size_t sent_ = 0;               // targets that have all
  std::vector<size_t> received_;  // bytes, by rank
  size_t missing_ = 0;            // bytes, of all
};

}  // namespace

std::unique_ptr<Round> make_allgather(Communicator& group, std::shared_ptr<Operation> operation,
                                      uint64_t seq, size_t begin, size_t bytes) {
  return std::make_unique<AllGather>(group, std::move(operation), seq, begin, bytes);
}

}  // namespace smddp
