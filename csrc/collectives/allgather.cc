// AllGather. Shards cross between nodes along the rails, in the flows of the selected pattern, and
// each rank pushes to its node what it has: the own shard first, then what lands from the network,
// piece by piece, while later pieces are still in flight. Each byte enters a node once.
#include "collectives/group.h"

namespace smddp {
namespace {

using intranode::Piece;

constexpr size_t kDirectPiece = 1 << 20;

constexpr size_t kCopyStep = 256 << 10;

class AllGather final : public Fragment {
 public:
  using Fragment::Fragment;

  void start() override {
    Rank me = group_.rank();
    direct_ = read_directly(limit_, group_.shape());
    streaming_ = streams();
    heard_.assign(static_cast<size_t>(group_.local_peers()), false);
    received_.assign(static_cast<size_t>(group_.ranks()), 0);
    if (in_place()) copied_ = part(operation_->output, me);
    make_flows();
    offer(me, nullptr, 0);
    for (const ReceiveFlow& receive : receive_flows_) {
      for (size_t i = 0; i < receive.run.shards(); ++i) {
        offer(receive.run.shard(i), &receive, receive.run.start(i));
      }
    }
    for (Rank shard = 0; shard < group_.ranks(); ++shard) {
      if (pusher(shard) != me) missing_ += part(operation_->output, shard);
    }
    pushed_ = group_.local_peers() == 0;
    open_flows(operation_->plan().pattern != Pattern::kLog);
  }

  bool progress(bool may_push) override {
    bool moved = widen();
    moved |= send();
    auto push = [&] {
      while (may_push && !pushed_ && push_one()) moved = true;
    };
    push();
    for (int i = 0; i < group_.local_peers(); ++i) {
      while (const Piece* head = group_.head(i, *this)) {
        moved = true;
        if (!take_in(i, *head)) return true;
        if (exposes()) push();
      }
    }
    return moved || copy_own();
  }

  bool pushed() const override { return pushed_; }

  bool complete() const override {
    return pushed_ && missing_ == 0 && copied_ == part(operation_->output, group_.rank()) &&
           heard_all() && flows_done() &&
           (!exposes() || group_.outbox().read_by_all() >= exposed_until_);
  }

  std::string waiting_for() const override {
    std::string names;
    auto name = [&](Rank rank) { names += (names.empty() ? "" : ", ") + group_.describe(rank); };
    for (Rank shard = 0; shard < group_.ranks(); ++shard) {
      if (shard == group_.rank()) continue;
      if (here(shard) < part(operation_->output, shard)) name(shard);
    }
    if (!names.empty()) return "no data from " + names;
    for (const SendFlow& send : send_flows_) {
      if (!send.done()) return group_.describe(send.target) + " takes no data";
    }
    for (int i = 0; i < group_.local_peers(); ++i) {
      if (group_.outbox().read_by(i) < exposed_until_) {
        return group_.describe(group_.local_peer(i)) + " has not finished it";
      }
    }
    return "nothing";
  }

 private:
  // What this rank pushes to its node: a shard, and where it comes from.
  struct Source {
    Rank shard;
    const ReceiveFlow* receive;  // nullptr: the own shard, here from the start
    size_t start;                // of the shard, in the receive's run
    size_t pushed;
  };

  // AllReduce gathers in place: its sums already lie in their block of the output.
  bool in_place() const { return operation_->collective == Collective::kAllReduce; }
  const Blocks& own_blocks() const { return in_place() ? operation_->output : operation_->input; }
  Rank own_block() const { return in_place() ? group_.rank() : 0; }

  // Copies a little more of the own shard into the output: the network and the node read the input,
  // so that nobody waits for this.
  bool copy_own() {
    size_t bytes = part(operation_->output, group_.rank());
    if (copied_ == bytes) return false;
    copy_own(std::min(bytes, copied_ + kCopyStep));
    return true;
  }

  void copy_own(size_t until) {
    Rank me = group_.rank();
    size_t bytes = part(operation_->output, me);
    while (copied_ < until) {
      std::byte *from = nullptr, *to = nullptr;
      size_t n = std::min(operation_->input.contiguous(0, begin_ + copied_, &from),
                          operation_->output.contiguous(me, begin_ + copied_, &to));
      if (from == to) {
        copied_ = std::min(bytes, copied_ + n);
        continue;
      }
      n = std::min(n, until - copied_);
      kernels::copy(to, from, n, streaming_);
      copied_ += n;
    }
  }

  void make_flows() {
    auto flows =
        pattern::gather_flows(group_.topology(), group_.rank(), operation_->plan().pattern);
    for (const pattern::Flow& flow : flows.in) {
      ReceiveFlow* receive = add_receive_flow(flow, run_of(flow));
      if (receive != nullptr) receive->memory = memory_of(receive->run);
    }
    for (const pattern::Flow& flow : flows.out) {
      SendFlow* send = add_send_flow(flow, run_of(flow));
      if (send != nullptr) send->memory = memory_of(send->run);
    }
  }

  ShardRun run_of(const pattern::Flow& flow) const {
    ShardRun run;
    for (Rank shard : flow.shards) run.add(shard, part(operation_->output, shard));
    return run;
  }

  std::byte* memory_of(const ShardRun& run) const {
    std::byte* at = nullptr;
    if (run.shards() != 1) return nullptr;
    Rank shard = run.shard(0);
    size_t length = shard == group_.rank() ? own_blocks().contiguous(own_block(), begin_, &at)
                                           : operation_->output.contiguous(shard, begin_, &at);
    return length >= run.bytes() ? at : nullptr;
  }

  void offer(Rank shard, const ReceiveFlow* receive, size_t start) {
    size_t bytes = part(operation_->output, shard);
    if (group_.local_peers() == 0 || bytes == 0) return;
    sources_.push_back({shard, receive, start, 0});
    to_push_ += bytes;
  }

  // The rank of this node that pushes `shard`: its own, or one that lands at it.
  Rank pusher(Rank shard) const {
    const Topology& topology = group_.topology();
    return pattern::entry(topology, topology.node_of(group_.rank()), shard,
                          operation_->plan().pattern);
  }

  // How much of another rank's shard is in the output, from its start.
  size_t here(Rank shard) const {
    return pusher(shard) == group_.rank() ? arrived(shard) : received_[static_cast<size_t>(shard)];
  }

  size_t available(const Source& source) const {
    size_t bytes = part(operation_->output, source.shard);
    if (source.receive == nullptr) return bytes;
    return std::min(bytes, source.receive->arrived_from(source.start));
  }

  void place(const ReceiveFlow& receive, size_t offset, const std::byte* payload,
             size_t bytes) override {
    receive.run.for_each(offset, bytes, [&](Rank shard, size_t at, size_t n, size_t from) {
      operation_->output.write(shard, begin_ + at, payload + from, n);
    });
  }

  bool send() {
    bool moved = false;
    for (SendFlow& send : send_flows_) {
      auto fill = [&](size_t offset, std::byte* to, size_t bytes) {
        send.run.for_each(offset, bytes, [&](Rank shard, size_t at, size_t n, size_t from) {
          read(shard, at, to + from, n);
        });
      };
      while (send_one(send, sendable(send), fill)) moved = true;
    }
    return moved;
  }

  // The next bytes of a source to its slot; of the own shard to the output as well, where both ends
  // of that copy lie end to end and the caches are to keep it. A shard of one slot is copied while the
  // peers' are on their way.
  void write(const Source& source, std::byte* slot, size_t bytes, bool streaming) {
    std::byte *from = nullptr, *to = nullptr;
    size_t at = begin_ + source.pushed;
    bool one_slot = part(operation_->output, source.shard) <= intranode::kSlotBytes;
    if (source.receive != nullptr || one_slot || streaming_ || copied_ != source.pushed ||
        operation_->input.contiguous(0, at, &from) < bytes ||
        operation_->output.contiguous(source.shard, at, &to) < bytes || from == to) {
      return read(source.shard, source.pushed, slot, bytes, streaming);
    }
    kernels::copy_twice(slot, to, from, bytes, streaming);
    copied_ += bytes;
  }

  void read(Rank shard, size_t offset, std::byte* to, size_t bytes, bool streaming = false) const {
    if (shard == group_.rank()) {
      own_blocks().read(own_block(), begin_ + offset, to, bytes, streaming);
    } else {
      operation_->output.read(shard, begin_ + offset, to, bytes, streaming);
    }
  }

  // How much of the run is here, from its start. Shards that are passed on have come in one receive
  // each, not always the same, or from a local peer.
  size_t sendable(const SendFlow& send) const {
    for (size_t i = 0; i < send.run.shards(); ++i) {
      Rank shard = send.run.shard(i);
      if (shard == group_.rank()) continue;
      size_t bytes = here(shard);
      if (bytes < send.run.length(i)) return send.run.start(i) + bytes;
    }
    return send.run.bytes();
  }

  size_t arrived(Rank shard) const {
    for (const ReceiveFlow& receive : receive_flows_) {
      for (size_t i = 0; i < receive.run.shards(); ++i) {
        if (receive.run.shard(i) != shard) continue;
        return std::min(receive.run.length(i), receive.arrived_from(receive.run.start(i)));
      }
    }
    return 0;
  }

  bool push_one() {
    Source* next = nullptr;
    size_t bytes = 0;
    std::vector<Extent> extents;  // to be read by the peers; empty: the bytes go into the slot
    std::byte* slot = group_.outbox().next();
    if (slot == nullptr) return false;
    for (Source& source : sources_) {
      bytes = part(operation_->output, source.shard) - source.pushed;
      if (bytes == 0) continue;
      extents = exposed(source, std::min(bytes, kDirectPiece));
      bytes = std::min(bytes, extents.empty() ? intranode::kSlotBytes : kDirectPiece);
      if (available(source) < source.pushed + bytes) continue;
      next = &source;
      break;
    }
    if (next == nullptr && to_push_ > 0) return false;  // more will land
    Piece piece;
    if (next != nullptr) {
      piece.shard = static_cast<uint32_t>(next->shard);
      piece.offset = next->pushed;
      piece.bytes = bytes;
      if (!extents.empty()) {
        std::memcpy(slot, extents.data(), extents.size() * sizeof(Extent));
        piece.extents = static_cast<uint32_t>(extents.size());
        exposed_until_ = group_.outbox().published() + 1;
      } else {
        group_.outbox().fill(bytes, [&](bool streaming) { write(*next, slot, bytes, streaming); });
      }
      next->pushed += bytes;
      to_push_ -= bytes;
    }
    piece.last = to_push_ == 0 ? 1 : 0;
    pushed_ = piece.last == 1;
    group_.push(*this, piece);
    // While the caches have it.
    if (streaming_ && next != nullptr && next->shard == group_.rank() && piece.extents == 0) {
      if (copied_ < next->pushed) copy_own(next->pushed);
    }
    return true;
  }

  // The memory behind the next `bytes` bytes of a source, where the peers are to read it there.
  std::vector<Extent> exposed(const Source& source, size_t bytes) const {
    if (bytes <= intranode::kSlotBytes) return {};
    const Blocks& blocks = source.receive == nullptr ? own_blocks() : operation_->output;
    Rank block = source.receive == nullptr ? own_block() : source.shard;
    return readable(blocks, block, begin_ + source.pushed, bytes, direct_);
  }

  bool take_in(int i, const Piece& head) {
    if (head.bytes > 0) {
      auto shard = static_cast<Rank>(head.shard);
      if (!fits(head)) {
        group_.fail({Code::kInternal,
                     group_.describe(group_.local_peer(i)) + " pushed a piece out of bounds"});
        return false;
      }
      for (size_t done = 0; done < head.bytes;) {
        size_t at = begin_ + head.offset + done;
        const std::byte* from = nullptr;
        size_t n = std::min(group_.reach(i, done, &from), head.bytes - done);
        if (n > 0) {
          operation_->output.write(shard, at, from, n, streaming_);
          count(head, n, false);
          done += n;
          continue;
        }
        intranode::Inbox& inbox = group_.inbox(i);
        n = head.bytes - done;
        std::vector<Extent> to = operation_->output.slice(shard, at, n);
        Status read = intranode::single_copy_read(inbox.pid(), inbox.extents(), head.extents, done,
                                                  n, to.data(), to.size());
        if (!read) {
          group_.fail_read(i, *this, read);
          return false;
        }
        count(head, n, true);
        done += n;
      }
      received_[head.shard] += head.bytes;
      missing_ -= head.bytes;
    }
    take(i, head);
    return true;
  }

  bool fits(const Piece& head) const {
    if (head.shard >= received_.size() || head.bytes > missing_) return false;
    size_t size = part(operation_->output, static_cast<Rank>(head.shard));
    return head.offset <= size && head.bytes <= size - head.offset &&
           head.bytes <= size - received_[head.shard];
  }

  bool direct_ = false;  // peers read memory that is not shared, too
  bool streaming_ = false;
  bool pushed_ = false;
  SmallVector<Source, 2> sources_;
  size_t copied_ = 0;                 // of the own shard, from input to output
  size_t to_push_ = 0;                // bytes, of all sources
  SmallVector<size_t, 16> received_;  // bytes that local peers have pushed, by shard
  size_t missing_ = 0;                // bytes that they have yet to push
};

}  // namespace

std::unique_ptr<Fragment> make_allgather(Group& group, std::shared_ptr<Operation> operation,
                                         uint64_t seq, size_t begin, size_t bytes) {
  return std::make_unique<AllGather>(group, std::move(operation), seq, begin, bytes);
}

}  // namespace smddp
