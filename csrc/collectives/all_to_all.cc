// All-to-all, gather and scatter: each pair of ranks has a block of its own, which goes straight from the one
// to the other. The sizes may differ from pair to pair, and a rank knows those of its own blocks only. So the
// whole operation is one fragment, whatever travels between two ranks carries the size of their block in its
// signature, and an empty block is sent as well: two ranks that disagree about a size both fail.
//
// Inside a host each rank pushes the blocks of the other ranks into its outbox, a piece for each in turn, and
// each takes the pieces that are for it. Between hosts each pair of ranks has a flow.
//
// The group makes it by make_all_to_all().
#include <algorithm>

#include "collectives/fragment.h"
#include "collectives/own_shard.h"

namespace smddp {
namespace {

using intranode::Piece;

// Only the sender of a message has something to copy into slots, and only the receiver something to copy out: they do it
// at the same time, part by part. 64 KiB 11.5 us for 17.5 in whole slots, 256 KiB 36.6 for 39.5 (2026-11-28, Intel Xeon).
// Eight parts of 4 KiB at least: 13.2, 45.2.
constexpr size_t kMessageParts = 4;

class AllToAll final : public Fragment {
 public:
  AllToAll(const FragmentContext& context, std::shared_ptr<Operation> operation, uint64_t seq)
      : Fragment(context, std::move(operation), seq, 0, SIZE_MAX, intranode::Lane::kGathers),
        own_(*operation_, context.members.rank(), 0, SIZE_MAX) {}

  void start() override;
  bool progress(bool may_push) override;
  bool pushed() const override { return pushed_; }
  bool complete() const override;

 private:
  // A block for a rank of this host.
  struct Target {
    Rank rank;
    size_t pushed;
    bool begun;  // its size has been pushed
  };

  // --- flows between hosts.

  void make_flows();
  ShardRun run_of(Rank block, size_t bytes) const;
  static std::byte* memory_of(const Blocks& blocks, const ShardRun& run);

  // --- pieces inside the host.

  uint64_t expected_from(int i) const override {
    return operation_->sends(local_.rank(i), members_.rank())
               ? operation_->output.bytes(local_.rank(i))
               : 0;
  }
  // What there is room for; true if that was anything.
  bool push_all() {
    bool any = false;
    while (!pushed_ && push_one()) any = true;
    return any;
  }
  bool push_one();
  // The block whose turn it is, or nullptr if all are pushed.
  Target* next_target();
  bool is_pushed(const Target& target) const {
    return target.begun && target.pushed == operation_->input.bytes(target.rank);
  }
  bool take_in(int i, const Piece& head);

  OwnShard own_;
  bool direct_ = false;  // peers read memory that is not shared, too
  bool streaming_ = false;
  size_t slot_part_ = intranode::kSlotBytes;  // bytes of a block that are copied into one slot
  bool pushed_ = false;
  SmallVector<Target, 8> targets_;        // each rank begins with the rank after it
  size_t turn_ = 0;                       // in targets_
  SmallVector<size_t, 16> missing_from_;  // bytes that local peer i has yet to push to this rank
  size_t missing_ = 0;
};

void AllToAll::start() {
  Rank me = members_.rank();
  const Topology& topology = members_.topology();
  direct_ = read_directly(operation_->collective, operation_->input.largest(), shape_);
  streaming_ = streams();
  if (is_message(operation_->collective)) {
    slot_part_ = std::clamp(operation_->signature().bytes / kMessageParts, kLeastMessagePart,
                            intranode::kSlotBytes);
  }
  expect_pieces();
  own_.start(streaming_);
  const std::vector<Rank>& here = topology.node(topology.node_of(me));
  auto own = static_cast<size_t>(topology.local_index(me));
  for (size_t i = 1; i < here.size(); ++i) {
    Rank target = here[(own + i) % here.size()];
    if (operation_->sends(me, target)) targets_.push_back({target, 0, false});
  }
  missing_from_.assign(static_cast<size_t>(local_.count()), 0);
  for (int i = 0; i < local_.count(); ++i) {
    missing_from_[static_cast<size_t>(i)] = expected_from(i);
    missing_ += expected_from(i);
  }
  pushed_ = local_.count() == 0;
  make_flows();
  flows_.open(true);
}

bool AllToAll::progress(bool may_push) {
  bool moved = flows_.allow_more();
  moved |= send([](const SendFlow& flow) { return flow.run.bytes(); },
                [&](Rank block, size_t at, std::byte* to, size_t bytes) {
                  operation_->input.read(block, at, to, bytes);
                });
  moved |= may_push && push_all();
  for (int i = 0; i < local_.count(); ++i) {
    while (const Piece* head = inbox_head(i)) {
      if (!take_in(i, *head)) return true;
      moved = true;
      if (may_push) push_all();
    }
  }
  // Last: the network and the local peers read the input, so none of them waits for this copy.
  return own_.copy_some() || moved;
}

bool AllToAll::complete() const {
  return pushed_ && missing_ == 0 && own_.copied() == own_.bytes() && heard_all() &&
         flows_.complete() && is_read();
}

void AllToAll::make_flows() {
  if (shape_.nodes == 1) return;
  Rank me = members_.rank();
  pattern::Flows pairs = pattern::pair_flows(members_.topology(), me);
  for (const pattern::Flow& flow : pairs.in) {
    if (!operation_->sends(flow.peer, me)) continue;
    const Blocks& output = operation_->output;
    ReceiveFlow* receive = flows_.add_receive(flow, run_of(flow.peer, output.bytes(flow.peer)));
    receive->memory = memory_of(output, receive->run);
  }
  for (const pattern::Flow& flow : pairs.out) {
    if (!operation_->sends(me, flow.peer)) continue;
    const Blocks& input = operation_->input;
    SendFlow* send = flows_.add_send(flow, run_of(flow.peer, input.bytes(flow.peer)));
    send->memory = memory_of(input, send->run);
  }
}

ShardRun AllToAll::run_of(Rank block, size_t bytes) const {
  ShardRun run;
  if (bytes > 0) {
    run.add(block, bytes);
  } else {
    run.pad();
  }
  return run;
}

std::byte* AllToAll::memory_of(const Blocks& blocks, const ShardRun& run) {
  std::byte* at = nullptr;
  if (run.shards() == 0) return nullptr;
  return blocks.contiguous(run.shard(0), 0, &at) >= run.bytes() ? at : nullptr;
}

AllToAll::Target* AllToAll::next_target() {
  for (size_t i = 0; i < targets_.size(); ++i) {
    Target& target = targets_[(turn_ + i) % targets_.size()];
    if (is_pushed(target)) continue;
    turn_ = (turn_ + i + 1) % targets_.size();
    return &target;
  }
  return nullptr;
}

// A rank that has no block for any rank of the host pushes an empty piece for itself: the peers have to hear
// that it has started.
bool AllToAll::push_one() {
  std::byte* slot = next_slot();
  if (slot == nullptr) return false;
  Target* target = next_target();
  Piece piece;
  piece.shard = static_cast<uint32_t>(target != nullptr ? target->rank : members_.rank());
  if (target != nullptr) {
    const Blocks& input = operation_->input;
    size_t left = input.bytes(target->rank) - target->pushed;
    std::vector<Extent> extents;
    if (left > intranode::kSlotBytes)
      extents =
          readable(input, target->rank, target->pushed, std::min(left, kDirectPiece), direct_);
    piece.offset = target->pushed;
    piece.bytes = std::min(left, extents.empty() ? slot_part_ : kDirectPiece);
    put(slot, piece, extents, [&](bool streaming) {
      input.read(target->rank, target->pushed, slot, piece.bytes, streaming);
    });
    target->begun = true;
    target->pushed += piece.bytes;
  }
  pushed_ =
      std::all_of(targets_.begin(), targets_.end(), [&](const Target& t) { return is_pushed(t); });
  piece.last = pushed_ ? 1 : 0;
  publish(piece);
  return true;
}

bool AllToAll::take_in(int i, const Piece& head) {
  if (head.shard != static_cast<uint32_t>(members_.rank())) {
    Piece passed = head;
    passed.bytes = 0;  // nothing of it is read
    passed.extents = 0;
    take(i, passed);
    return true;
  }
  Rank source = local_.rank(i);
  size_t& missing = missing_from_[static_cast<size_t>(i)];
  if (head.bytes > missing || head.offset != operation_->output.bytes(source) - missing)
    return fail_piece(i);
  if (!copy_piece(i, head, source, head.offset, streaming_)) return false;
  missing -= head.bytes;
  missing_ -= head.bytes;
  take(i, head);
  return true;
}

}  // namespace

std::unique_ptr<Fragment> make_all_to_all(const FragmentContext& context,
                                          std::shared_ptr<Operation> operation, uint64_t seq) {
  return std::make_unique<AllToAll>(context, std::move(operation), seq);
}

}  // namespace smddp
