// ReduceScatter, the mirror of AllGather. Within a node each block is summed by one rank: its
// owner, or the owner's gateway. Gateways send their node's partial sum towards the owner along the
// rail, in the mirrored flows of the selected pattern; whoever receives partials adds them in node
// order, the own node's among them, as far as all have come. Contributions of a node are added in
// rank order. Both orders are fixed, so results do not depend on timing.
//
// All ranks of a node cut all blocks into the same sequence of pieces (Cuts), push those that
// others sum, and sum those that are theirs, piece by piece, once every local peer's head is that
// piece. The least unsummed piece, in sequence order, is always at the head of every outbox or
// about to be: no ring of any length can deadlock. Sums go to staging memory, not to the network,
// so that a remote rank that is late holds up nobody's sums.
#include "collectives/communicator.h"
#include "device/reduce.h"
#include "intranode/arena.h"

namespace smddp {
namespace {

using intranode::Piece;

constexpr size_t kDirectPiece = 1 << 20;
// Below, a copy into the slot costs less than waiting for its readers.
constexpr size_t kSharedPiece = 8 << 10;

constexpr size_t kBlockElements = 16 << 10;  // accumulator and one source stay in L2

struct Cut {
  int at = 0;  // of the block in the order of the node
  Rank block = 0;
  size_t offset = 0;
  size_t bytes = 0;
};

// A block that this rank sums its node's contributions to.
struct Share {
  struct Partial {  // what arrives for it from another node
    const Inlet* inlet;
    size_t start;  // in the inlet's run
    int node;
  };
  Rank block;
  size_t bytes;
  std::vector<Partial> partials;  // by node
  Staging node_sum;               // unrounded, where partials are to be added to it
  std::byte* out = nullptr;       // where the result waits to be sent on
  size_t summed = 0;              // bytes to which all of this node has contributed
  size_t combined = 0;            // bytes to which all partials have been added

  size_t done() const { return partials.empty() ? summed : combined; }
};

class ReduceScatter final : public Round {
 public:
  using Round::Round;

  void start() override {
    node_ = group_.topology().node_of(group_.rank());
    alone_ = group_.local_peers() == 0;
    dtype_ = operation_->dtype;
    sum_type_ = device::accumulator_of(dtype_);
    element_ = operation_->element_size;
    wire_type_ = (operation_->signature().options & kPartialsInFp32) != 0 ? sum_type_ : dtype_;
    wire_element_ = size_of(wire_type_);
    direct_ =
        read_directly(limit_, group_.shape()) && operation_->tensors <= intranode::kSlotExtents;
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

  // A missing partial sum may be the sender's fault or that of any rank behind it.
  bool knows_whom() const override {
    if (wanted_.bytes > 0 || flows_done()) return true;
    return std::any_of(outlets_.begin(), outlets_.end(),
                       [](const Outlet& o) { return !o.cleared; });
  }

  bool progress(bool may_push) override {
    bool moved = widen();
    while (may_push && !pushed_ && push_one()) moved = true;
    while (!alone_ && sum_one()) moved = true;
    for (Share& share : shares_) moved |= combine(share);
    return send() || moved;
  }

  bool pushed() const override { return pushed_; }

  bool complete() const override {
    return pushed_ && wanted_.bytes == 0 && heard_all() &&
           shares_.front().done() == shares_.front().bytes && flows_done() &&
           (exposed_until_ == 0 || group_.outbox().read_by_all() >= exposed_until_);
  }

  std::string waiting_for() const override {
    std::string names;
    auto name = [&](Rank rank) { names += (names.empty() ? "" : ", ") + group_.describe(rank); };
    for (int i = 0; i < group_.local_peers(); ++i) {
      const Piece* head = group_.inbox(i).head();
      if (!heard(i) && (head == nullptr || head->seq != seq_)) name(group_.local_peer(i));
    }
    if (!names.empty()) return "no data from " + names;
    for (const Outlet& outlet : outlets_) {
      if (!outlet.cleared) return group_.describe(outlet.target) + " has not started it";
    }
    for (const Inlet& inlet : inlets_) {
      if (!inlet.coverage.complete()) name(inlet.source);
    }
    if (!names.empty()) return "no partial sums from " + names;
    for (const Outlet& outlet : outlets_) {
      if (!outlet.done()) return group_.describe(outlet.target) + " takes no data";
    }
    for (int i = 0; i < group_.local_peers(); ++i) {
      if (!heard(i) || group_.outbox().read_by(i) < group_.outbox().published()) {
        return group_.describe(group_.local_peer(i)) + " has not finished it";
      }
    }
    return "nothing";
  }

 private:
  size_t to_wire(size_t bytes) const { return bytes / element_ * wire_element_; }
  size_t from_wire(size_t bytes) const { return bytes / wire_element_ * element_; }
  Rank reducer(Rank block) const { return pattern::reducer(group_.topology(), node_, block); }

  void make_flows() {
    const Topology& topology = group_.topology();
    auto mirror = pattern::gather_flows(topology, group_.rank(), operation_->plan().pattern);
    share_of_.assign(static_cast<size_t>(group_.ranks()), -1);
    add_share(group_.rank());
    for (const pattern::Flow& flow : mirror.in) {
      for (Rank block : flow.shards) add_share(block);
    }
    for (const pattern::Flow& flow : mirror.out) {
      Stream stream = stream_of(flow);
      if (stream.bytes() == 0) continue;
      staging_.push_back(group_.staging().take(stream.bytes()));
      Inlet& inlet = inlets_.emplace_back(flow.peer, flow.step, std::move(stream), head_of(stream));
      inlet.memory = staging_.back().data();
      for (size_t i = 0; i < inlet.stream.shards(); ++i) {
        share(inlet.stream.shard(i))
            .partials.push_back({&inlet, inlet.stream.start(i), topology.node_of(inlet.source)});
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
      Stream stream = stream_of(flow);
      if (stream.bytes() == 0) continue;
      Outlet& outlet = outlets_.emplace_back();
      outlet.target = flow.peer;
      outlet.step = flow.step;
      outlet.head = head_of(stream);
      outlet.stream = std::move(stream);
      if (sent_from_input(outlet)) continue;
      staging_.push_back(group_.staging().take(outlet.stream.bytes()));
      outlet.memory = staging_.back().data();
      for (size_t i = 0; i < outlet.stream.shards(); ++i) {
        share(outlet.stream.shard(i)).out = staging_.back().data() + outlet.stream.start(i);
      }
    }
    if (!alone_) return;
    for (Share& s : shares_) {
      if (s.partials.empty() && (s.out != nullptr || s.block == group_.rank())) pass_on(s);
    }
  }

  void add_share(Rank block) {
    share_of_[static_cast<size_t>(block)] = static_cast<int>(shares_.size());
    Share& s = shares_.emplace_back();
    s.block = block;
    s.bytes = part(operation_->input, block);
  }

  Share& share(Rank block) {
    return shares_[static_cast<size_t>(share_of_[static_cast<size_t>(block)])];
  }
  const Share& share(Rank block) const {
    return shares_[static_cast<size_t>(share_of_[static_cast<size_t>(block)])];
  }

  Stream stream_of(const pattern::Flow& flow) const {
    Stream stream;
    for (Rank block : flow.shards) stream.add(block, to_wire(part(operation_->input, block)));
    return stream;
  }

  // Where nothing is to be added to it, a block goes out of the input as it is.
  bool sent_from_input(Outlet& outlet) {
    if (!alone_ || wire_type_ != dtype_ || outlet.stream.shards() != 1) return false;
    Rank block = outlet.stream.shard(0);
    if (!share(block).partials.empty()) return false;
    std::byte* at = nullptr;
    if (operation_->input.contiguous(block, begin_, &at) >= outlet.stream.bytes())
      outlet.memory = at;
    return true;
  }

  void place(const Inlet& inlet, size_t offset, const std::byte* payload, size_t bytes) override {
    device::copy(inlet.memory + offset, payload, bytes, false);
  }

  bool send() {
    bool moved = false;
    for (Outlet& outlet : outlets_) {
      auto fill = [&](size_t offset, std::byte* to, size_t bytes) {
        operation_->input.read(outlet.stream.shard(0), begin_ + offset, to, bytes);
      };
      while (send_one(outlet, sendable(outlet), fill)) moved = true;
    }
    return moved;
  }

  size_t sendable(const Outlet& outlet) const {
    for (size_t i = 0; i < outlet.stream.shards(); ++i) {
      size_t here = to_wire(share(outlet.stream.shard(i)).done());
      if (here < outlet.stream.length(i)) return outlet.stream.start(i) + here;
    }
    return outlet.stream.bytes();
  }

  // The next cut after `cut` (at -1: the first) among those this rank sums (`mine`) or its local peers
  // sum. The sequence runs over all blocks at one offset, those of other nodes first since they have
  // further to go, then on to the next offset. 0 bytes: end.
  Cut next(Cut cut, bool mine) const {
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

  bool push_one() {
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
        operation_->input.read(cut.block, begin_ + cut.offset, slot, cut.bytes);
      }
      next_to_push_ = next(cut, false);
    }
    piece.last = next_to_push_.bytes == 0 ? 1 : 0;
    pushed_ = piece.last == 1;
    group_.push(*this, piece);
    return true;
  }

  // The memory behind a cut, where the peers are to read it there.
  std::vector<Extent> exposed(const Cut& cut) const {
    std::byte* first = nullptr;
    operation_->input.contiguous(cut.block, begin_ + cut.offset, &first);
    if (!direct_ && (cut.bytes < kSharedPiece || !intranode::Arena::process().may_own(first)))
      return {};
    std::vector<Extent> extents =
        operation_->input.slice(cut.block, begin_ + cut.offset, cut.bytes);
    return direct_ || (extents.size() <= intranode::kSlotExtents && group_.shares(extents))
               ? extents
               : std::vector<Extent>();
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

  bool sum_one() {
    if (wanted_.bytes == 0) return align_heads();
    if (!align_heads() || !sum_node()) return false;
    for (int i = 0; i < group_.local_peers(); ++i) take(i, *group_.inbox(i).head());
    share(wanted_.block).summed += wanted_.bytes;
    wanted_ = next(wanted_, true);
    return true;
  }

  // Where a share's bytes from `at` on go once nothing is to be added to them, and how many lie there
  // end to end. 0 where they are not of the type that is summed.
  size_t result_run(const Share& s, size_t at, std::byte** to) const {
    if (s.block != group_.rank()) {
      *to = s.out + at;
      return wire_type_ == dtype_ ? s.bytes - at : 0;
    }
    bool all_reduce = operation_->collective == Collective::kAllReduce;
    return operation_->output.contiguous(all_reduce ? group_.rank() : 0, begin_ + at, to);
  }

  // Sums `bytes` bytes of the sources, all of the operation's type, in one go.
  void fuse(const Share& s, std::byte* to, size_t bytes) {
    bool whole = s.block == group_.rank();
    device::reduce(to, sources_.data(), sources_.size(), bytes / element_, dtype_,
                   operation_->reduce_op, whole ? operation_->divisor_among(group_.ranks()) : 1,
                   streaming_);
  }

  // As much of the wanted piece from `at` on as lies end to end everywhere, summed in rank order in one
  // go. 0 where the sources can't be read in place, or their sum isn't the result.
  size_t fuse_node(size_t at, size_t limit) {
    const Share& target = share(wanted_.block);
    std::byte *own = nullptr, *to = nullptr;
    if (!target.partials.empty()) return 0;
    size_t n = std::min({limit, result_run(target, at, &to),
                         operation_->input.contiguous(wanted_.block, begin_ + at, &own)});
    sources_.clear();
    for (int i = 0; i < group_.local_peers(); ++i) {
      if (group_.local_peer(i) > group_.rank() && own != nullptr)
        sources_.push_back(std::exchange(own, nullptr));
      const std::byte* theirs = nullptr;
      n = std::min(n, group_.reach(i, at - group_.inbox(i).head()->offset, &theirs));
      sources_.push_back(theirs);
    }
    if (own != nullptr) sources_.push_back(own);
    if (n == 0) return 0;
    fuse(target, to, n);
    for (int i = 0; i < group_.local_peers(); ++i) count(*group_.inbox(i).head(), n, false);
    return n;
  }

  // Adds the node's contributions to the wanted piece in rank order.
  bool sum_node() {
    Share& target = share(wanted_.block);
    for (size_t done = 0; done < wanted_.bytes;) {
      std::byte* own = nullptr;
      size_t at = wanted_.offset + done;
      if (size_t n = fuse_node(at, wanted_.bytes - done)) {
        done += n;
        continue;
      }
      size_t n = std::min({wanted_.bytes - done, kBlockElements * element_,
                           operation_->input.contiguous(wanted_.block, begin_ + at, &own)});
      size_t count = n / element_;
      alignas(64) static thread_local std::byte accumulator[kBlockElements * 8];
      bool first = true;
      auto add = [&](const std::byte* source) {
        if (first) {
          device::load(accumulator, source, count, dtype_);
        } else {
          device::accumulate(accumulator, source, count, dtype_, operation_->reduce_op);
        }
        first = false;
      };
      for (int i = 0; i < group_.local_peers(); ++i) {
        if (group_.local_peer(i) > group_.rank() && own != nullptr)
          add(std::exchange(own, nullptr));
        const std::byte* theirs = peer_bytes(i, at, n);
        if (theirs == nullptr) return false;
        add(theirs);
      }
      if (own != nullptr) add(own);
      if (target.partials.empty()) {
        deliver(target, at, accumulator, count);
      } else {
        size_t width = size_of(sum_type_);
        std::memcpy(target.node_sum.data() + at / element_ * width, accumulator, count * width);
      }
      done += n;
    }
    return true;
  }

  const std::byte* peer_bytes(int i, size_t offset, size_t bytes) {
    intranode::Inbox& inbox = group_.inbox(i);
    const Piece& head = *inbox.head();
    size_t into = offset - head.offset;
    const std::byte* at = nullptr;
    bool here = group_.reach(i, into, &at) >= bytes;
    count(head, bytes, !here);
    if (here) return at;
    alignas(64) static thread_local std::byte scratch[kBlockElements * 8];
    Extent to{scratch, bytes};
    Status read = intranode::single_copy_read(inbox.pid(), inbox.extents(), head.extents, into,
                                              bytes, &to, 1);
    if (read.ok()) return scratch;
    group_.fail_read(i, *this, read);
    return nullptr;
  }

  // The same for the partial sums of a share, in node order.
  size_t fuse_partials(const Share& s, size_t limit) {
    if (wire_type_ != dtype_ || (!alone_ && sum_type_ != dtype_)) return 0;
    std::byte *own = nullptr, *to = nullptr;
    size_t n = std::min(limit, result_run(s, s.combined, &to));
    if (alone_) {
      n = std::min(n, operation_->input.contiguous(s.block, begin_ + s.combined, &own));
    } else {
      own = s.node_sum.data() + s.combined;
    }
    sources_.clear();
    for (const auto& partial : s.partials) {
      if (partial.node > node_ && own != nullptr) sources_.push_back(std::exchange(own, nullptr));
      sources_.push_back(partial.inlet->memory + partial.start + s.combined);
    }
    if (own != nullptr) sources_.push_back(own);
    if (n > 0) fuse(s, to, n);
    return n;
  }

  // Adds the partial sums to what all of them cover by now.
  bool combine(Share& s) {
    if (s.partials.empty()) return false;
    size_t covered = s.summed;
    for (const auto& partial : s.partials) {
      covered = std::min(covered, from_wire(partial.inlet->arrived_from(partial.start)));
    }
    bool moved = s.combined < covered;
    while (s.combined < covered) {
      if (size_t n = fuse_partials(s, covered - s.combined)) {
        s.combined += n;
        continue;
      }
      size_t n = std::min(covered - s.combined, kBlockElements * element_);
      std::byte* own = nullptr;
      if (alone_) {
        n = std::min(n, operation_->input.contiguous(s.block, begin_ + s.combined, &own));
      } else {
        own = s.node_sum.data() + s.combined / element_ * size_of(sum_type_);
      }
      size_t count = n / element_;
      alignas(64) static thread_local std::byte accumulator[kBlockElements * 8];
      bool first = true;
      auto add = [&](const std::byte* source, Dtype type) {
        if (first) {
          device::load(accumulator, source, count, type);
        } else {
          device::accumulate(accumulator, source, count, type, operation_->reduce_op);
        }
        first = false;
      };
      for (const auto& partial : s.partials) {
        if (partial.node > node_ && own != nullptr)
          add(std::exchange(own, nullptr), alone_ ? dtype_ : sum_type_);
        add(partial.inlet->memory + partial.start + to_wire(s.combined), wire_type_);
      }
      if (own != nullptr) add(own, alone_ ? dtype_ : sum_type_);
      deliver(s, s.combined, accumulator, count);
      s.combined += n;
    }
    return moved;
  }

  // Of a rank alone on its node and with nothing to add: the input is the sum.
  void pass_on(Share& s) {
    for (size_t done = 0; done < s.bytes;) {
      std::byte* from = nullptr;
      size_t n = std::min({s.bytes - done, kBlockElements * element_,
                           operation_->input.contiguous(s.block, begin_ + done, &from)});
      alignas(64) static thread_local std::byte accumulator[kBlockElements * 8];
      device::load(accumulator, from, n / element_, dtype_);
      deliver(s, done, accumulator, n / element_);
      done += n;
    }
  }

  // `count` elements of a share, from `offset` on, as far as this rank has to sum them: to where
  // they are sent from, or, of the own block, rounded once more into the output.
  void deliver(Share& s, size_t offset, std::byte* accumulator, size_t count) {
    if (s.block != group_.rank()) {
      device::store(s.out + to_wire(offset), accumulator, count, wire_type_);
      return;
    }
    if (operation_->reduce_op == ReduceOp::kAvg) {
      device::divide(accumulator, count, sum_type_, operation_->divisor_among(group_.ranks()));
    }
    bool all_reduce = operation_->collective == Collective::kAllReduce;
    Rank block = all_reduce ? group_.rank() : 0;
    size_t width = size_of(sum_type_);
    for (size_t done = 0; done < count;) {
      std::byte* to = nullptr;
      size_t n =
          operation_->output.contiguous(block, begin_ + offset + done * element_, &to) / element_;
      n = std::min(n, count - done);
      device::store(to, accumulator + done * width, n, dtype_);
      done += n;
    }
  }

  int node_ = 0;
  bool alone_ = false;  // on its node
  size_t element_ = 1, wire_element_ = 1;
  Dtype dtype_ = Dtype::kBytes, sum_type_ = Dtype::kBytes, wire_type_ = Dtype::kBytes;
  bool direct_ = false;     // peers read memory that is not shared, too
  bool streaming_ = false;  // results are written past the caches
  Few<const void*, 16> sources_;
  size_t piece_bytes_ = 0;
  bool pushed_ = false;
  Few<Rank, 16> order_;  // of the blocks, the same on all ranks of the node
  Cut next_to_push_, wanted_;
  std::vector<Share> shares_;  // the own block first
  Few<int, 16> share_of_;      // by block, -1: a local peer's
  std::vector<Staging> staging_;
};

}  // namespace

std::unique_ptr<Round> make_reduce_scatter(Communicator& group,
                                           std::shared_ptr<Operation> operation, uint64_t seq,
                                           size_t begin, size_t bytes) {
  return std::make_unique<ReduceScatter>(group, std::move(operation), seq, begin, bytes);
}

}  // namespace smddp
