#include "collectives/fragment.h"

#include <cstring>
#include <utility>

#include "intranode/arena.h"

namespace smddp {
namespace {

// If the ranks of a host together handle more bytes than this, few of them would still be in the caches
// when the caller reads them.
constexpr size_t kStreamedBytes = 24 << 20;

// True if every local peer can read these extents in place.
bool all_shared(const std::vector<Extent>& extents) {
  const intranode::Arena& arena = intranode::Arena::process();
  return std::all_of(extents.begin(), extents.end(), [&](const Extent& e) {
    return arena.may_own(e.address) && arena.contains(e.address, e.bytes);
  });
}

}  // namespace

bool Fragment::streams() const {
  auto here = static_cast<size_t>(local_.count()) + 1;
  return operation_->signature().bytes * here >= kStreamedBytes;
}

std::vector<Extent> Fragment::readable(const Blocks& blocks, Rank block, size_t at, size_t bytes,
                                       bool direct) const {
  const Signature& signature = operation_->signature();
  std::byte* first = nullptr;
  blocks.contiguous(block, at, &first);
  bool may_share = read_shared(signature.collective, signature.bytes) &&
                   intranode::Arena::process().may_own(first);
  if (!direct && !may_share) return {};
  std::vector<Extent> extents = blocks.slice(block, at, bytes);
  if (extents.size() > intranode::kSlotExtents || !(direct || all_shared(extents))) extents.clear();
  return extents;
}

const intranode::Piece* Fragment::inbox_head(int i) {
  const intranode::Piece* piece = local_.inbox(i).head();
  if (!health_.ok() || piece == nullptr || piece->seq != seq_) return nullptr;
  bool fits = piece->extents > 0 ? piece->extents <= intranode::kSlotExtents
                                 : piece->bytes <= intranode::kSlotBytes;
  if (fits && piece->signature == operation_->signature()) return piece;
  if (fits) {
    fail(disagreement(local_.rank(i), piece->signature));
  } else {
    fail({Code::kInternal, members_.describe(local_.rank(i)) + " pushed a damaged piece"});
  }
  return nullptr;
}

void Fragment::take(int i, const intranode::Piece& piece) {
  if (piece.extents > 0 && local_.inbox(i).gave_up(seq_))
    fail({Code::kAborted, local_.inbox(i).aborted()});
  has_received_ = true;
  taken_from_[static_cast<size_t>(i)] += piece.bytes;
  if (piece.last != 0) heard_[static_cast<size_t>(i)] = true;
  local_.pop(i);
}

void Fragment::publish(intranode::Piece piece) {
  piece.seq = seq_;
  piece.signature = operation_->signature();
  local_.push(piece);
}

Status Fragment::on_message(const wire::Header& h, const std::byte* payload) {
  auto source = static_cast<Rank>(h.source);
  if (h.signature != operation_->signature()) return disagreement(source, h.signature);
  if (h.type == wire::Type::kReady) {
    wire::Grant grant;
    bool granted = h.bytes == sizeof grant;
    if (granted) std::memcpy(&grant, payload, sizeof grant);
    return flows_.on_ready(source, h.offset, granted ? &grant : nullptr);
  }
  has_received_ = true;
  if (h.type == wire::Type::kWritten) return flows_.on_written(source, h.offset);
  ReceiveFlow* receive = flows_.on_data(source, h.offset, h.bytes);
  if (receive == nullptr) {
    return {Code::kMismatch,
            members_.describe(source) + " sent data that is not part of this operation"};
  }
  place(*receive, h.offset, payload, h.bytes);
  return {};
}

void Fragment::follow_starts() {
  if (begin_ != 0 || after != 0) return;
  starts_.begin(members_.ranks());
  for (int i = 0; i < local_.count(); ++i) starts_.await(local_.rank(i));
  FlowTiming::await(starts_, flows_.receives(), remote_, seq_);
}

// A rank publishes its first piece when it starts, and never waits for another rank with it.
void Fragment::look_at_inboxes() {
  uint64_t now = 0;
  for (int i = 0; i < local_.count(); ++i) {
    if (!starts_.is_unseen(local_.rank(i))) continue;
    const intranode::Piece* piece = local_.inbox(i).head();
    if (piece == nullptr || piece->seq < seq_) continue;
    if (now == 0) now = now_ns();
    starts_.seen(local_.rank(i), now);
  }
}

void Fragment::on_start(Rank source, wire::Type type) {
  if (!starts_.is_unseen(source)) return;
  Collective collective = operation_->signature().collective;
  starts_.seen(source, now_ns(),
               flows_.timing().starts_by_itself(flows_.receives(), source, type, collective));
}

std::shared_ptr<Operation> Fragment::finish() {
  starts_.count(tallies_, operation_->waited_from_ns.load(std::memory_order_relaxed));
  flows_.close();
  return std::move(operation_);
}

std::string Fragment::describe() const {
  return smddp::describe(operation_->signature()) + " #" + std::to_string(operation_->number()) +
         " of group '" + members_.group_name() + "'";
}

Status Fragment::disagreement(Rank other, const Signature& theirs) const {
  return {Code::kMismatch, members_.describe(other) + " called " + smddp::describe(theirs) +
                               " while " + members_.describe(members_.rank()) + " called " +
                               smddp::describe(operation_->signature())};
}

Status Fragment::lost(int i) const {
  return {Code::kPeerLost, members_.describe(local_.rank(i)) + " (process " +
                               std::to_string(local_.inbox(i).pid()) + ") ended during " +
                               describe()};
}

void Fragment::fail_read(int i, const Status& why) {
  if (why.code() == Code::kPeerLost) return fail(lost(i));
  fail({why.code(), members_.describe(local_.rank(i)) + ": " + why.message()});
}

}  // namespace smddp
