// ReduceScatter, the mirror of AllGather. Inside a host each block is summed by one rank: its owner, or the
// owner's gateway on this host. A gateway sends its host's partial sum towards the owner along the rail, in
// the mirrored flows of the selected pattern. The rank that receives partial sums adds them in host order
// (BlockSums). The contributions of a host are added in rank order. Both orders are fixed, so results do
// not depend on timing.
//
// All ranks of a host cut all blocks into the same sequence of pieces. Each rank pushes
// those that other ranks sum. It sums its own pieces one by one, once the head of every local peer's
// outbox is the wanted piece. The first piece of the sequence that is not summed yet is always at the head
// of every outbox or about to be, so there is no deadlock, however few slots an outbox has. Sums go to
// staging memory, not to the network, so a remote rank that is late delays no sum on this host.
//
// The group makes it by make_reduce_scatter().
#include <algorithm>
#include <climits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collectives/block_sums.h"
#include "collectives/fragment.h"
#include "common/processor.h"
#include "common/small_vector.h"
#include "kernels/reduce.h"
#include "topology/pattern.h"

namespace smddp {
namespace {

using intranode::Piece;

// Between hosts a pass pushes, and sums, at most this many pieces before it looks at the network again: the
// network idles while a rank sums all that its local peers have pushed. 64 MiB on 2 x 2 took 288 ms for 296 (2026-11-22,
// AMD EPYC). Of one piece 1.06 to 1.11 of the time over the loopback, of 16 pieces 0.93 to 0.97, and as long at 1 Gbit/s
// (2026-11-29-constants).
constexpr int kPiecesPerPass = 4;

// Of peers' memory, read before it is summed, of all peers together. 128 KiB take up to 1.05 of its time, 32 KiB 1.2
// (2026-11-29-intel-xeon).
constexpr size_t kFetchedBytes = 256 << 10;
static_assert(kFetchedBytes >= BlockSums::kElements * 8);

struct BlockPiece {
  int position = 0;  // of the block in the order of the host
  Rank block = 0;
  size_t offset = 0;  // into the fragment's part of the block
  size_t bytes = 0;   // 0: the end of the sequence
};

class ReduceScatter final : public Fragment {
 public:
  ReduceScatter(const FragmentContext& context, std::shared_ptr<Operation> operation, uint64_t seq,
                size_t begin, size_t bytes, std::shared_ptr<PartSums> part)
      : Fragment(context, std::move(operation), seq, begin, bytes, intranode::Lane::kSums),
        part_(std::move(part)),
        sums_(context.members.topology(), context.members.rank(), context.staging, *operation_,
              begin, bytes) {}

  void start() override;
  // False while only flows are incomplete that have started: a missing partial sum may be the fault of the
  // sender or of any rank behind it.
  bool can_blame() const override;
  bool progress(bool may_push) override;
  bool pushed() const override { return pushed_; }
  bool complete() const override;
  std::string waiting_for() const override;

 private:
  // --- flows between hosts.

  void make_flows();
  ShardRun run_of(const pattern::Flow& flow) const;
  void place(const ReceiveFlow& flow, size_t offset, const std::byte* payload,
             size_t bytes) override {
    kernels::copy(flow.memory + offset, payload, bytes, false);
  }

  // --- pieces inside the host.
  //
  // All ranks of the host cut the blocks alike. The sequence of pieces runs over all blocks at one offset, then on to
  // the next offset. Blocks of other hosts come before those of this host, because they have further to go.

  // Whether this rank sums its host's contributions to `block`.
  bool sums_here(Rank block) const;
  // The first piece among those that this rank sums (`here`) or that its local peers sum, and the next one
  // after `piece`.
  BlockPiece first_piece(bool here) const { return next_piece({.position = -1}, here); }
  BlockPiece next_piece(BlockPiece piece, bool here) const;
  bool push_one();
  // The memory behind a piece if the local peers are to read it there, else nothing.
  std::vector<Extent> exposed(const BlockPiece& piece) const;
  // Drops pieces that other ranks sum from the heads of the inboxes. True if every local peer's head is the
  // wanted piece; if no piece is wanted any more, true if that dropped something.
  bool align_heads();
  bool sum_one();
  // Adds the host's contributions to the wanted piece in rank order. False if a peer's could not be read.
  bool sum_wanted();
  // As much of the next `limit` bytes of the wanted piece as lies end to end everywhere, in one pass,
  // straight into the result. 0 if the sources can't be had so, or if their sum isn't the result.
  size_t sum_in_one_pass(size_t at, size_t limit);
  // Bytes of the piece at the head of inbox i: where they lie, or fetched to byte `place` of this thread's memory for that;
  // nullptr: the group has failed.
  const std::byte* peer_bytes(int i, size_t offset, size_t bytes, size_t place = 0);
  // The inbox of the rank at `position` among the ranks of the host, which is not own_position_.
  int inbox_at(int position) const { return position < own_position_ ? position : position - 1; }

  const std::shared_ptr<PartSums> part_;  // of an AllReduce
  BlockSums sums_;
  SmallVector<Rank, 16> order_;  // of the blocks, the same on all ranks of the host
  bool alone_ = false;           // on its host
  int own_position_ = 0;         // among the ranks of the host
  bool direct_ = false;          // peers read memory that is not shared, too
  bool pushed_ = false;
  BlockPiece next_to_push_, wanted_;
  BlockSums::Sources sources_;
};

void ReduceScatter::start() {
  alone_ = local_.count() == 0;
  own_position_ = members_.topology().local_index(members_.rank());
  // Of several tensors each would take a system call.
  direct_ = part_ == nullptr && operation_->tensors == 1 &&
            read_directly(operation_->collective, limit_, shape_);
  expect_pieces();
  const Topology& topology = members_.topology();
  for (int i = 1; i <= topology.nodes(); ++i) {
    int node = (topology.node_of(members_.rank()) + i) % topology.nodes();
    for (Rank block : topology.node(node)) order_.push_back(block);
  }
  sums_.start(part_ == nullptr && streams());  // an AllReduce reads its sums again at once
  make_flows();
  pushed_ = alone_;
  if (!alone_) {
    next_to_push_ = first_piece(false);
    wanted_ = first_piece(true);
  }
  flows_.open(operation_->plan().pattern == Pattern::kDirect);
}

bool ReduceScatter::can_blame() const {
  if (wanted_.bytes > 0 || flows_.complete()) return true;
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
  if (part_ != nullptr) part_->here = sums_.own().here();
  bool sent = send([&](const SendFlow& flow) { return sums_.sendable(flow); },
                   [&](Rank block, size_t at, std::byte* to, size_t n) {
                     operation_->input.read(block, begin_ + at, to, n);
                   });
  return sent || moved;
}

bool ReduceScatter::complete() const {
  return pushed_ && wanted_.bytes == 0 && heard_all() && sums_.own().here() == sums_.own().bytes &&
         flows_.complete() && is_read();
}

std::string ReduceScatter::waiting_for() const {
  std::string names = late_peers();
  if (!names.empty()) return "no data from " + names;
  for (const SendFlow& flow : flows_.sends()) {
    if (!flow.cleared) return members_.describe(flow.target) + " has not started it";
  }
  names = late_senders();
  return names.empty() ? waiting_for_takers() : "no partial sums from " + names;
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

// --- pieces inside the host.

bool ReduceScatter::sums_here(Rank block) const {
  const Topology& topology = members_.topology();
  Rank me = members_.rank();
  return pattern::reducer(topology, topology.node_of(me), block) == me;
}

BlockPiece ReduceScatter::next_piece(BlockPiece piece, bool here) const {
  const Blocks& blocks = operation_->input;
  const size_t most = direct_ ? kDirectPiece : intranode::kSlotBytes;
  size_t largest = std::min(limit_, blocks.largest() > begin_ ? blocks.largest() - begin_ : 0);
  for (;;) {
    if (++piece.position == members_.ranks()) {
      piece.position = 0;
      piece.offset += most;
    }
    if (piece.offset >= largest) return {};
    piece.block = order_[static_cast<size_t>(piece.position)];
    size_t size = part(blocks, piece.block);
    if (piece.offset >= size || sums_here(piece.block) != here) continue;
    piece.bytes = std::min(most, size - piece.offset);
    return piece;
  }
}

bool ReduceScatter::push_one() {
  std::byte* slot = next_slot();
  if (slot == nullptr) return false;
  Piece piece;
  BlockPiece next = next_to_push_;
  if (next.bytes > 0) {
    piece.shard = static_cast<uint32_t>(next.block);
    piece.offset = next.offset;
    piece.bytes = next.bytes;
    put(slot, piece, exposed(next), [&](bool streaming) {
      operation_->input.read(next.block, begin_ + next.offset, slot, next.bytes, streaming);
    });
    next_to_push_ = next_piece(next, false);
  }
  piece.last = next_to_push_.bytes == 0 ? 1 : 0;
  pushed_ = piece.last == 1;
  publish(piece);
  return true;
}

std::vector<Extent> ReduceScatter::exposed(const BlockPiece& piece) const {
  if (piece.bytes < kSharedPiece) return {};
  return readable(operation_->input, piece.block, begin_ + piece.offset, piece.bytes, direct_);
}

bool ReduceScatter::align_heads() {
  bool aligned = true, dropped = false;
  for (int i = 0; i < local_.count(); ++i) {
    const Piece* head = inbox_head(i);
    while (head != nullptr &&
           (head->bytes == 0 || head->shard >= static_cast<uint32_t>(members_.ranks()) ||
            !sums_here(static_cast<Rank>(head->shard)))) {
      take(i, *head);
      dropped = true;
      head = inbox_head(i);
    }
    if (head == nullptr) {
      aligned = false;
    } else if (head->shard != static_cast<uint32_t>(wanted_.block) ||
               head->offset != wanted_.offset || head->bytes != wanted_.bytes) {
      fail({Code::kInternal, members_.describe(local_.rank(i)) + " pushed a piece out of order"});
      return false;
    }
  }
  return wanted_.bytes == 0 ? dropped : aligned;
}

bool ReduceScatter::sum_one() {
  if (wanted_.bytes == 0) return align_heads();
  if (!align_heads() || !sum_wanted()) return false;
  for (int i = 0; i < local_.count(); ++i) take(i, *head(i));
  sums_.of(wanted_.block).summed += wanted_.bytes;
  wanted_ = next_piece(wanted_, true);
  return true;
}

bool ReduceScatter::sum_wanted() {
  BlockSum& sum = sums_.of(wanted_.block);
  size_t element = operation_->element_size;
  for (size_t done = 0; done < wanted_.bytes;) {
    size_t at = wanted_.offset + done;
    if (size_t n = sum_in_one_pass(at, wanted_.bytes - done)) {
      done += n;
      continue;
    }
    std::byte* own = nullptr;
    size_t n = std::min({wanted_.bytes - done, BlockSums::kElements * element,
                         operation_->input.contiguous(wanted_.block, begin_ + at, &own)});
    auto sources = static_cast<size_t>(local_.count()) + 1;
    std::byte* total = sums_.accumulate(sources, n / element, [&](size_t k) -> BlockSums::Source {
      auto position = static_cast<int>(k);
      bool is_own = position == own_position_;
      return {is_own ? own : peer_bytes(inbox_at(position), at, n), operation_->dtype};
    });
    if (total == nullptr) return false;
    sums_.put_host_sum(sum, at, total, n / element);
    done += n;
  }
  return true;
}

size_t ReduceScatter::sum_in_one_pass(size_t at, size_t limit) {
  const BlockSum& sum = sums_.of(wanted_.block);
  if (!sum.partials.empty()) return 0;
  std::byte *own = nullptr, *to = nullptr;
  size_t n = std::min({limit, sums_.result_run(sum, at, &to),
                       operation_->input.contiguous(wanted_.block, begin_ + at, &own)});
  const size_t room = kFetchedBytes / static_cast<size_t>(local_.count()) / kCacheLine * kCacheLine;
  const std::byte* in_place = nullptr;
  for (int i = 0; i < local_.count(); ++i)
    n = std::min(n, direct_ ? room : reach(i, at - head(i)->offset, &in_place));
  if (n == 0) return 0;
  sources_.clear();
  for (int position = 0; position <= local_.count(); ++position) {
    const int i = inbox_at(position);
    const std::byte* source =
        position == own_position_ ? own : peer_bytes(i, at, n, static_cast<size_t>(i) * room);
    if (source == nullptr) return 0;
    sources_.push_back(source);
  }
  sums_.reduce(sum, to, n, sources_);
  return n;
}

const std::byte* ReduceScatter::peer_bytes(int i, size_t offset, size_t bytes, size_t place) {
  intranode::Inbox& inbox = local_.inbox(i);
  const Piece& head = *this->head(i);
  size_t into = offset - head.offset;
  const std::byte* at = nullptr;
  bool here = reach(i, into, &at) >= bytes;
  count(head, bytes, !here);
  if (here) return at;
  alignas(kCacheLine) static thread_local std::byte fetched[kFetchedBytes];
  Extent to{fetched + place, bytes};
  Status read = intranode::single_copy_read(inbox.pid(), inbox.extents(lane_), head.extents, into,
                                            bytes, &to, 1);
  if (read.ok()) return to.address;
  fail_read(i, read);
  return nullptr;
}

}  // namespace

std::unique_ptr<Fragment> make_reduce_scatter(const FragmentContext& context,
                                              std::shared_ptr<Operation> operation, uint64_t seq,
                                              size_t begin, size_t bytes,
                                              std::shared_ptr<PartSums> part) {
  return std::make_unique<ReduceScatter>(context, std::move(operation), seq, begin, bytes,
                                         std::move(part));
}

}  // namespace smddp
