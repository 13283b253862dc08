// ReduceScatter, the mirror of AllGather. Within a node each block is summed by one rank: its
// owner, or the owner's gateway. Gateways send their node's partial sum to the owner along the
// rail; the owner adds the partials in node order. Contributions of a node are added in rank order.
// Both orders are fixed, so results do not depend on timing.
//
// All ranks of a node cut all blocks into the same sequence of pieces (Cuts), push those that
// others sum, and sum those that are theirs, piece by piece, once every local peer's head is that
// piece. The least unsummed piece, in sequence order, is always at the head of every outbox or
// about to be: no ring of any length can deadlock.
#include <deque>

#include "collectives/communicator.h"
#include "device/reduce.h"
#include "schedule/pattern.h"

namespace smddp {
namespace {

using intranode::Piece;

constexpr size_t kDirectPiece = 1 << 20;
constexpr size_t kBlockElements = 16 << 10;  // accumulator and one source stay in L2

struct Cut {
  Rank block = 0;
  size_t offset = 0;
  size_t bytes = 0;
};

class ReduceScatter final : public Round {
 public:
  using Round::Round;

  void start() override {
    Rank me = group_.rank();
    const Topology& topology = group_.topology();
    node_ = topology.node_of(me);
    element_ = operation_->element_size;
    wire_type_ = (operation_->signature().options & 1) != 0
                     ? device::accumulator_of(operation_->dtype)
                     : operation_->dtype;
    wire_element_ = size_of(wire_type_);
    direct_ =
        read_directly(limit_, group_.shape()) && operation_->tensors <= intranode::kSlotExtents;
    piece_bytes_ = direct_ ? kDirectPiece : intranode::kSlotBytes;
    heard_.assign(static_cast<size_t>(group_.local_peers()), false);
    ready_.assign(static_cast<size_t>(group_.ranks()), false);
    own_bytes_ = part(operation_->input, me);
    if (topology.nodes() > 1 && own_bytes_ > 0) {
      own_sum_.resize(own_bytes_ / element_ * size_of(device::accumulator_of(operation_->dtype)));
      partial_.resize(static_cast<size_t>(topology.nodes()));
      for (int node = 0; node < topology.nodes(); ++node) {
        if (node == node_) continue;
        partial_[static_cast<size_t>(node)].bytes.resize(own_bytes_ / element_ * wire_element_);
        ++partials_missing_;
      }
      announce();
    }
    pushed_ = group_.local_peers() == 0;
    next_to_push_ = next({-1, 0, 0}, false);
    wanted_ = next({-1, 0, 0}, true);
    finished_ = own_bytes_ == 0;
  }

  void announce() override {
    for (size_t node = 0; node < partial_.size(); ++node) {
      if (partial_[node].received == partial_[node].bytes.size()) continue;
      group_.send_ready(*this, group_.topology().gateway(group_.rank(), static_cast<int>(node)));
    }
  }

  // A missing partial sum may be the sender's fault or that of any rank behind it.
  bool knows_whom() const override {
    if (partials_missing_ == 0 || own_done_ < own_bytes_) return true;
    return wanted_.bytes > 0;
  }

  bool progress(bool may_push) override {
    bool moved = false;
    while (may_push && !pushed_ && push_one()) moved = true;
    while (sum_one()) moved = true;
    if (!finished_ && own_done_ == own_bytes_ && partials_missing_ == 0) {
      if (group_.topology().nodes() > 1) add_partials();
      finished_ = true;
      moved = true;
    }
    return moved;
  }

  bool pushed() const override { return pushed_; }

  bool complete() const override {
    return pushed_ && finished_ && wanted_.bytes == 0 && heard_all() &&
           (exposed_until_ == 0 || group_.outbox().read_by_all() >= exposed_until_);
  }

  void on_ready(Rank source) override { ready_[static_cast<size_t>(source)] = true; }

  Status on_data(const wire::Header& header, const std::byte* payload) override {
    const Topology& topology = group_.topology();
    auto source = static_cast<Rank>(header.source);
    int node = topology.node_of(source);
    size_t elements = header.bytes / wire_element_;
    bool known = static_cast<Rank>(header.shard) == group_.rank() && node != node_ &&
                 !partial_.empty() && topology.gateway(group_.rank(), node) == source &&
                 header.bytes % wire_element_ == 0 && header.offset % element_ == 0 &&
                 header.offset <= own_bytes_ && elements * element_ <= own_bytes_ - header.offset;
    if (known) {
      Partial& partial = partial_[static_cast<size_t>(node)];
      known = header.bytes <= partial.bytes.size() - partial.received;
      if (known) {
        std::memcpy(partial.bytes.data() + header.offset / element_ * wire_element_, payload,
                    header.bytes);
        partial.received += header.bytes;
        if (partial.received == partial.bytes.size()) --partials_missing_;
        return {};
      }
    }
    return {Code::kMismatch,
            group_.describe(source) + " sent data that is not part of this operation"};
  }

  std::string waiting_for() const override {
    std::string names;
    auto name = [&](Rank rank) { names += (names.empty() ? "" : ", ") + group_.describe(rank); };
    for (int i = 0; i < group_.local_peers(); ++i) {
      const Piece* head = group_.inbox(i).head();
      if (!heard(i) && (head == nullptr || head->seq != seq_)) name(group_.local_peer(i));
    }
    if (!names.empty()) return "no data from " + names;
    if (wanted_.bytes > 0 && wanted_.block != group_.rank() &&
        !ready_[static_cast<size_t>(wanted_.block)]) {
      return group_.describe(wanted_.block) + " has not started it";
    }
    for (size_t node = 0; node < partial_.size(); ++node) {
      if (partial_[node].received == partial_[node].bytes.size()) continue;
      name(group_.topology().gateway(group_.rank(), static_cast<int>(node)));
    }
    if (!names.empty()) return "no partial sums from " + names;
    for (int i = 0; i < group_.local_peers(); ++i) {
      if (!heard(i) || group_.outbox().read_by(i) < group_.outbox().published()) {
        return group_.describe(group_.local_peer(i)) + " has not finished it";
      }
    }
    return "nothing";
  }

 private:
  struct Partial {
    std::vector<std::byte> bytes;
    size_t received = 0;
  };

  // The next cut after `cut` (block -1: the first) among those this rank sums (`mine`) or its local
  // peers sum. The sequence runs over all blocks at one offset, then on to the next offset. 0
  // bytes: end.
  Cut next(Cut cut, bool mine) const {
    size_t largest = std::min(
        limit_, operation_->input.largest() > begin_ ? operation_->input.largest() - begin_ : 0);
    for (;;) {
      if (++cut.block == group_.ranks()) {
        cut.block = 0;
        cut.offset += piece_bytes_;
      }
      if (cut.offset >= largest) return {0, 0, 0};
      size_t size = part(operation_->input, cut.block);
      if (cut.offset >= size || (reducer(cut.block) == group_.rank()) != mine) continue;
      cut.bytes = std::min(piece_bytes_, size - cut.offset);
      return cut;
    }
  }

  Rank reducer(Rank block) const { return pattern::reducer(group_.topology(), node_, block); }

  bool push_one() {
    std::byte* slot = group_.outbox().next();
    if (slot == nullptr) return false;
    Piece piece;
    Cut cut = next_to_push_;
    if (cut.bytes > 0) {
      piece.shard = static_cast<uint32_t>(cut.block);
      piece.offset = cut.offset;
      piece.bytes = cut.bytes;
      if (direct_) {
        std::vector<Extent> extents =
            operation_->input.slice(cut.block, begin_ + cut.offset, cut.bytes);
        std::memcpy(slot, extents.data(), extents.size() * sizeof(Extent));
        piece.extents = static_cast<uint32_t>(extents.size());
        exposed_until_ = group_.outbox().published() + 1;
      } else {
        operation_->input.read(cut.block, begin_ + cut.offset, slot, cut.bytes);
      }
      next_to_push_ = next(cut, false);
    }
    piece.last = next_to_push_.bytes == 0 ? 1 : 0;
    pushed_ = piece.last == 1;
    group_.push(*this, piece);
    return true;
  }

  // Drops what others sum from the heads. True when every local peer's head is the wanted piece;
  // when nothing is wanted any more, when that dropped something.
  bool align_heads() {
    bool aligned = true, dropped = false;
    for (int i = 0; i < group_.local_peers(); ++i) {
      const Piece* head = group_.head(i, *this);
      while (head != nullptr &&
             (head->bytes == 0 || head->shard >= static_cast<uint32_t>(group_.ranks()) ||
              reducer(static_cast<Rank>(head->shard)) != group_.rank())) {
        take(i, *head);
        dropped = true;
        head = group_.head(i, *this);
      }
      if (head == nullptr) {
        aligned = false;
      } else if (head->shard != static_cast<uint32_t>(wanted_.block) ||
                 head->offset != wanted_.offset || head->bytes != wanted_.bytes) {
        group_.fail({Code::kInternal,
                     group_.describe(group_.local_peer(i)) + " pushed a piece out of order"});
        return false;
      }
    }
    return wanted_.bytes == 0 ? dropped : aligned;
  }

  // Sums the wanted piece, or as much of it as there are send buffers for.
  bool sum_one() {
    if (wanted_.bytes == 0) return align_heads();
    bool mine = wanted_.block == group_.rank();
    if (!align_heads()) return false;
    if (!mine && !ready_[static_cast<size_t>(wanted_.block)]) return false;
    while (summed_ < wanted_.bytes) {
      size_t offset = wanted_.offset + summed_;
      size_t n = wanted_.bytes - summed_;
      bool good;
      if (mine) {
        good = sum(offset, n, nullptr);
        own_done_ += n;
      } else {
        fabric::SendBuffer* buffer = group_.acquire(wanted_.block);
        if (buffer == nullptr) return false;
        n = std::min(n, group_.max_payload() / wire_element_ * element_);
        good = sum(offset, n, Communicator::payload(buffer));
        group_.send_data(*this, buffer, wanted_.block, offset, n / element_ * wire_element_);
      }
      if (!good) return false;
      summed_ += n;
    }
    for (int i = 0; i < group_.local_peers(); ++i) take(i, *group_.inbox(i).head());
    summed_ = 0;
    wanted_ = next(wanted_, true);
    return true;
  }

  // Adds the node's contributions to bytes [offset, offset + bytes) of the wanted block in rank
  // order. To `out` in the wire's type, or for the own block to where it belongs.
  bool sum(size_t offset, size_t bytes, std::byte* out) {
    Dtype dtype = operation_->dtype;
    Dtype sum_type = device::accumulator_of(dtype);
    for (size_t done = 0; done < bytes;) {
      std::byte* own = nullptr;
      size_t n =
          std::min({bytes - done, kBlockElements * element_,
                    operation_->input.contiguous(wanted_.block, begin_ + offset + done, &own)});
      size_t count = n / element_;
      alignas(64) static thread_local std::byte accumulator[kBlockElements * 8];
      bool first = true;
      auto add = [&](const std::byte* source) {
        if (first) {
          device::load(accumulator, source, count, dtype);
        } else {
          device::accumulate(accumulator, source, count, dtype, operation_->reduce_op);
        }
        first = false;
      };
      for (int i = 0; i < group_.local_peers(); ++i) {
        if (group_.local_peer(i) > group_.rank() && own != nullptr)
          add(std::exchange(own, nullptr));
        const std::byte* theirs = peer_bytes(i, offset + done, n);
        if (theirs == nullptr) return false;
        add(theirs);
      }
      if (own != nullptr) add(own);
      if (out != nullptr) {
        device::store(out, accumulator, count, wire_type_ == sum_type ? sum_type : dtype);
        out += count * wire_element_;
      } else if (!own_sum_.empty()) {
        size_t width = size_of(sum_type);
        std::memcpy(own_sum_.data() + (offset + done) / element_ * width, accumulator,
                    count * width);
      } else {
        emit(offset + done, accumulator, count);
      }
      done += n;
    }
    return true;
  }

  const std::byte* peer_bytes(int i, size_t offset, size_t bytes) {
    intranode::Inbox& inbox = group_.inbox(i);
    const Piece& head = *inbox.head();
    size_t into = offset - head.offset;
    if (head.extents == 0) return inbox.bytes() + into;
    alignas(64) static thread_local std::byte scratch[kBlockElements * 8];
    Extent to{scratch, bytes};
    Status read = intranode::single_copy_read(inbox.pid(), inbox.extents(), head.extents, into,
                                              bytes, &to, 1);
    if (read.ok()) return scratch;
    group_.fail_read(i, *this, read);
    return nullptr;
  }

  void add_partials() {
    Dtype sum_type = device::accumulator_of(operation_->dtype);
    size_t total = own_bytes_ / element_;
    for (size_t done = 0; done < total;) {
      size_t count = std::min(total - done, kBlockElements);
      alignas(64) static thread_local std::byte accumulator[kBlockElements * 8];
      for (int node = 0; node < group_.topology().nodes(); ++node) {
        bool own = node == node_;
        Dtype type = own ? sum_type : wire_type_;
        const std::byte* from =
            own ? own_sum_.data() : partial_[static_cast<size_t>(node)].bytes.data();
        from += done * size_of(type);
        if (node == 0) {
          device::load(accumulator, from, count, type);
        } else {
          device::accumulate(accumulator, from, count, type, operation_->reduce_op);
        }
      }
      emit(done * element_, accumulator, count);
      done += count;
    }
  }

  // The final value of `count` elements of the own block, rounded once more, into the output.
  void emit(size_t offset, std::byte* accumulator, size_t count) {
    Dtype dtype = operation_->dtype;
    if (operation_->reduce_op == ReduceOp::kAvg) {
      device::divide(accumulator, count, device::accumulator_of(dtype), group_.ranks());
    }
    bool all_reduce = operation_->collective == Collective::kAllReduce;
    Rank block = all_reduce ? group_.rank() : 0;
    size_t width = size_of(device::accumulator_of(dtype));
    for (size_t done = 0; done < count;) {
      std::byte* to = nullptr;
      size_t n =
          operation_->output.contiguous(block, begin_ + offset + done * element_, &to) / element_;
      n = std::min(n, count - done);
      device::store(to, accumulator + done * width, n, dtype);
      done += n;
    }
  }

  int node_ = 0;
  size_t element_ = 1, wire_element_ = 1;
  Dtype wire_type_ = Dtype::kBytes;
  bool direct_ = false;
  size_t piece_bytes_ = 0;
  bool pushed_ = false;
  bool finished_ = false;
  Cut next_to_push_, wanted_;
  size_t summed_ = 0;               // of the wanted piece
  size_t own_bytes_ = 0;            // of this rank's block in this round
  size_t own_done_ = 0;             // of those, summed over this node
  std::vector<bool> ready_;         // by rank: can take its partial sums
  std::vector<std::byte> own_sum_;  // this node's sum of the own block, unrounded
  std::vector<Partial> partial_;    // other nodes', by node
  size_t partials_missing_ = 0;
};

}  // namespace

std::unique_ptr<Round> make_reduce_scatter(Communicator& group,
                                           std::shared_ptr<Operation> operation, uint64_t seq,
                                           size_t begin, size_t bytes) {
  return std::make_unique<ReduceScatter>(group, std::move(operation), seq, begin, bytes);
}

}  // namespace smddp
