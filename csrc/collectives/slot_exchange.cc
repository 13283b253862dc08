#include "collectives/slot_exchange.h"

#include <utility>

#include "kernels/reduce.h"

namespace smddp {

using intranode::Piece;

SlotExchange::SlotExchange(const FragmentContext& context, Operation& operation)
    : local_(context.local),
      operation_(operation),
      rank_(context.members.rank()),
      ranks_(context.members.ranks()),
      sums_(smddp::sums(operation.collective)),
      own_(operation, rank_, 0, SIZE_MAX),
      left_(context.local.count()) {
  taken_.assign(static_cast<size_t>(left_), false);
  own_.start(false);
}

bool SlotExchange::push(uint64_t seq) {
  std::byte* slot = local_.outbox().next(kLane);
  if (slot == nullptr) return false;
  Piece piece;
  piece.seq = seq;
  piece.signature = operation_.signature();
  piece.shard = static_cast<uint32_t>(rank_);
  piece.bytes = bytes_of(rank_);
  piece.last = 1;
  local_.outbox().fill(piece.bytes, [&](bool streaming) { fill(slot, streaming); });
  local_.push(kLane, piece);
  local_.wake();
  // While the peers' pieces are on their way.
  if (!sums_) own_.copy_until(own_.bytes());
  return pushed_ = true;
}

void SlotExchange::look(uint64_t seq) {
  auto head = [&](int i) {
    const Piece* piece = local_.inbox(i).head(kLane);
    bool ours = piece != nullptr && piece->seq == seq && piece->signature == operation_.signature();
    return ours ? piece : nullptr;
  };
  look(head, [&](int i, const Piece&) { local_.pop(kLane, i); }, [](int) {});
}

void SlotExchange::fill(std::byte* slot, bool streaming) const {
  if (is_message(operation_.collective)) {
    const Rank peer = 1 - rank_;
    return operation_.input.read(peer, 0, slot, bytes_of(rank_), streaming);
  }
  if (!sums_) return own_.read(0, slot, own_.bytes(), streaming);
  for (Rank block = 0; block < ranks_; ++block) {
    const size_t bytes = operation_.input.bytes(block);
    if (is_read_by_peers(block)) operation_.input.read(block, 0, slot, bytes, streaming);
    slot += bytes;
  }
}

size_t SlotExchange::bytes_of(Rank rank) const {
  if (sums_) return operation_.signature().bytes;
  if (!is_message(operation_.collective)) return operation_.output.bytes(rank);
  return operation_.sends(rank, 1 - rank) ? operation_.signature().bytes : 0;
}

bool SlotExchange::fits(int i, const Piece& piece) const {
  const Rank rank = local_.rank(i);
  return piece.shard == static_cast<uint32_t>(rank) && piece.bytes == bytes_of(rank) &&
         piece.offset == 0 && piece.extents == 0 && piece.last == 1;
}

// The output may be the input itself: the peers read this rank's slot, not its input.
void SlotExchange::sum() {
  const bool keeps_all = operation_.collective == Collective::kAllReduce;
  size_t at = 0;
  for (Rank block = 0; block < ranks_; ++block) {
    if (keeps_all || block == rank_) sum_block(block, keeps_all ? block : 0, at);
    at += operation_.input.bytes(block);
  }
}

void SlotExchange::sum_block(Rank block, Rank result, size_t begin) {
  SmallVector<const void*, 16> sources;
  auto sum = [&](std::byte* own, std::byte* to, size_t bytes, size_t offset) {
    sources.clear();
    for (int i = 0; i <= local_.count(); ++i) {
      // In the order of the ranks, which are all of this host.
      if (i == rank_) sources.push_back(own);
      if (i < local_.count()) sources.push_back(local_.inbox(i).bytes(kLane) + begin + offset);
    }
    kernels::reduce(to, sources.data(), sources.size(), bytes / operation_.element_size,
                    operation_.dtype, operation_.reduce_op, operation_.divisor_among(ranks_));
    operation_.taken.slots += bytes * static_cast<size_t>(local_.count());
  };
  operation_.input.for_each_stretch(block, operation_.output, result, sum);
}

namespace {

class SlotFragment final : public Fragment {
 public:
  SlotFragment(const FragmentContext& context, std::shared_ptr<Operation> operation, uint64_t seq,
               SlotExchange begun)
      : Fragment(context, std::move(operation), seq, 0, SIZE_MAX, intranode::Lane::kSums),
        exchange_(std::move(begun)) {}

  void start() override {
    expect_pieces();
    for (int i = 0; i < local_.count(); ++i) {
      if (exchange_.has_taken(i)) note_taken(i, expected_from(i));
    }
  }
  bool progress(bool may_push) override {
    bool moved = may_push && !exchange_.pushed() && exchange_.push(seq_);
    bool took = exchange_.look([&](int i) { return inbox_head(i); },
                               [&](int i, const Piece& piece) { take(i, piece); },
                               [&](int i) { fail_piece(i); });
    return took || moved;
  }
  bool pushed() const override { return exchange_.pushed(); }
  bool complete() const override { return exchange_.complete(); }

 private:
  uint64_t expected_from(int i) const override { return exchange_.bytes_of(local_.rank(i)); }

  SlotExchange exchange_;
};

}  // namespace

std::unique_ptr<Fragment> make_slot_exchange(const FragmentContext& context,
                                             std::shared_ptr<Operation> operation, uint64_t seq,
                                             SlotExchange begun) {
  return std::make_unique<SlotFragment>(context, std::move(operation), seq, std::move(begun));
}

}  // namespace smddp
