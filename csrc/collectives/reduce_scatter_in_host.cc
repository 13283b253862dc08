// The pieces of a ReduceScatter inside the host: what this rank pushes, and its sums of what the local
// peers push, in rank order.
#include <algorithm>
#include <cstring>

#include "collectives/reduce_scatter.h"

namespace smddp {
namespace {

using intranode::Piece;

// For smaller pieces a copy into the slot costs less than the wait for the readers of this rank's memory.
constexpr size_t kSharedPiece = 8 << 10;

}  // namespace

bool ReduceScatter::push_one() {
  std::byte* slot = next_slot();
  if (slot == nullptr) return false;
  Piece piece;
  BlockPiece next = next_to_push_;
  if (next.bytes > 0) {
    piece.shard = static_cast<uint32_t>(next.block);
    piece.offset = next.offset;
    piece.bytes = next.bytes;
    std::vector<Extent> extents = exposed(next);
    if (!extents.empty()) {
      std::memcpy(slot, extents.data(), extents.size() * sizeof(Extent));
      piece.extents = static_cast<uint32_t>(extents.size());
      expose();
    } else {
      local_.outbox().fill(next.bytes, [&](bool streaming) {
        operation_->input.read(next.block, begin_ + next.offset, slot, next.bytes, streaming);
      });
    }
    next_to_push_ = pieces_.next(next, false);
  }
  piece.last = next_to_push_.bytes == 0 ? 1 : 0;
  pushed_ = piece.last == 1;
  publish(piece);
  return true;
}

std::vector<Extent> ReduceScatter::exposed(const BlockPiece& piece) const {
  if (!direct_ && piece.bytes < kSharedPiece) return {};
  return readable(operation_->input, piece.block, begin_ + piece.offset, piece.bytes, direct_);
}

bool ReduceScatter::align_heads() {
  bool aligned = true, dropped = false;
  for (int i = 0; i < local_.count(); ++i) {
    const Piece* head = inbox_head(i);
    while (head != nullptr &&
           (head->bytes == 0 || head->shard >= static_cast<uint32_t>(members_.ranks()) ||
            !pieces_.sums_here(static_cast<Rank>(head->shard)))) {
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
  wanted_ = pieces_.next(wanted_, true);
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
  sources_.clear();
  for (int position = 0; position <= local_.count(); ++position) {
    if (position == own_position_) {
      sources_.push_back(own);
      continue;
    }
    int i = inbox_at(position);
    const std::byte* theirs = nullptr;
    n = std::min(n, reach(i, at - head(i)->offset, &theirs));
    sources_.push_back(theirs);
  }
  if (n == 0) return 0;
  sums_.reduce(sum, to, n, sources_);
  for (int i = 0; i < local_.count(); ++i) count(*head(i), n, false);
  return n;
}

const std::byte* ReduceScatter::peer_bytes(int i, size_t offset, size_t bytes) {
  intranode::Inbox& inbox = local_.inbox(i);
  const Piece& head = *this->head(i);
  size_t into = offset - head.offset;
  const std::byte* at = nullptr;
  bool here = reach(i, into, &at) >= bytes;
  count(head, bytes, !here);
  if (here) return at;
  alignas(64) static thread_local std::byte scratch[BlockSums::kElements * 8];
  Extent to{scratch, bytes};
  Status read = intranode::single_copy_read(inbox.pid(), inbox.extents(lane_), head.extents, into,
                                            bytes, &to, 1);
  if (read.ok()) return scratch;
  fail_read(i, read);
  return nullptr;
}

}  // namespace smddp
