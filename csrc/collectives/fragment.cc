#include "collectives/fragment.h"

#include <utility>

#include "intranode/arena.h"
#include "kernels/reduce.h"

namespace smddp {
namespace {

// If the ranks of a host together handle more bytes than this, few of them would still be in the caches
// when the caller reads them. Two ranks of a processor with 32 MiB of L3: from 8 MiB on, 4 MiB took 1.3 times as long;
// from 48 MiB on, 16 MiB 1.4 times (2026-11-29-constants, AMD EPYC).
constexpr size_t kStreamedBytes = 24 << 20;

// True if every local peer can read these extents in place.
bool all_shared(const std::vector<Extent>& extents) {
  const intranode::Arena& arena = intranode::Arena::process();
  return std::all_of(extents.begin(), extents.end(), [&](const Extent& e) {
    return arena.may_own(e.address) && arena.contains(e.address, e.bytes);
  });
}

std::string join(const std::string& names, const std::string& more) {
  return names.empty() || more.empty() ? names + more : names + ", " + more;
}

}  // namespace

FlowLimits Fragment::limits_of(const FragmentContext& context, size_t chunk_bytes) {
  if (context.shape.nodes == 1) return {};
  const transport::Facts& network = context.remote.transport().facts();
  if (network.ordered) return {reach_bytes(context.shape), SIZE_MAX};
  return {reach_bytes(context.shape, chunk_bytes, network.nics),
          send_window_bytes(context.shape, chunk_bytes, network.nics)};
}

FlowCoding Fragment::coding_of(const FragmentContext& context) const {
  const Shape& shape = context.shape;
  bool unrounded = (operation_->signature().options & kPartialsInFp32) != 0 && !gathers_sums_;
  Dtype type = operation_->dtype;
  if (operation_->plan().whole) {
    type = whole_sum_type(type, shape);
  } else if (unrounded) {
    type = kernels::accumulator_of(type);
  }
  return {operation_->on_device ? Coding::kOff : operation_->coding, type,
          shape.network.bytes_per_ns * shape.nodes / shape.ranks, context.coding};
}

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
  const intranode::Piece* piece = head(i);
  bool in_lane = piece != nullptr && piece->seq == seq_;
  // A rank that calls something else may push it through the other lane.
  if (!in_lane) piece = local_.inbox(i).head(intranode::other(lane_));
  if (!health_.ok() || piece == nullptr || piece->seq != seq_) return nullptr;
  bool fits = piece->extents > 0 ? piece->extents <= intranode::kSlotExtents
                                 : piece->bytes <= intranode::kSlotBytes;
  if (!fits || (!in_lane && piece->signature == operation_->signature())) {
    fail({Code::kInternal, members_.describe(local_.rank(i)) + " pushed a damaged piece"});
    return nullptr;
  }
  const Signature& theirs = piece->signature;
  // The size of a block for another rank is that rank's to check; that of a message both ranks have.
  bool for_this =
      piece->shard == static_cast<uint32_t>(members_.rank()) || is_message(operation_->collective);
  Signature ours = between_two(operation_->signature(),
                               for_this ? pair_bytes(local_.rank(i), true) : theirs.bytes);
  if (theirs == ours && in_lane) return piece;
  fail(disagreement(local_.rank(i), true, theirs, ours));
  return nullptr;
}

void Fragment::take(int i, const intranode::Piece& piece) {
  if (piece.extents > 0 && local_.inbox(i).gave_up(seq_))
    fail({Code::kAborted, local_.inbox(i).aborted()});
  has_received_ = true;
  taken_from_[static_cast<size_t>(i)] += piece.bytes;
  if (piece.last != 0) heard_[static_cast<size_t>(i)] = true;
  local_.pop(lane_, i);
}

bool Fragment::copy_piece(int i, const intranode::Piece& piece, Rank block, size_t at,
                          bool streaming) {
  for (size_t done = 0; done < piece.bytes;) {
    const std::byte* from = nullptr;
    size_t n = std::min(reach(i, done, &from), piece.bytes - done);
    bool fetched = n == 0;
    if (!fetched) {
      operation_->output.write(block, at + done, from, n, streaming);
    } else {
      intranode::Inbox& inbox = local_.inbox(i);
      n = piece.bytes - done;
      std::vector<Extent> to = operation_->output.slice(block, at + done, n);
      Status read = intranode::single_copy_read(inbox.pid(), inbox.extents(lane_), piece.extents,
                                                done, n, to.data(), to.size());
      if (!read) {
        fail_read(i, read);
        return false;
      }
    }
    count(piece, n, fetched);
    done += n;
  }
  return true;
}

void Fragment::publish(intranode::Piece piece) {
  piece.seq = seq_;
  piece.signature =
      between_two(operation_->signature(), pair_bytes(static_cast<Rank>(piece.shard), false));
  local_.push(lane_, piece);
}

void Fragment::place(const ReceiveFlow& receive, size_t offset, const std::byte* payload,
                     size_t bytes) {
  receive.run.for_each(offset, bytes, [&](Rank block, size_t at, size_t n, size_t from) {
    operation_->output.write(block, begin_ + at, payload + from, n);
  });
}

std::string Fragment::waiting_for() const {
  if (!peer_has_called()) return has_not_called(*operation_, members_.describe(peer()));
  std::string names = join(late_peers(), late_senders());
  return names.empty() ? waiting_for_takers() : "no data from " + names;
}

std::string Fragment::late_peers() const {
  std::string names;
  for (int i = 0; i < local_.count(); ++i) {
    if (is_late(i)) names = join(names, members_.describe(local_.rank(i)));
  }
  return names;
}

std::string Fragment::late_senders() const {
  std::string names;
  for (const ReceiveFlow& flow : flows_.receives()) {
    if (!flow.complete()) names = join(names, members_.describe(flow.source));
  }
  return names;
}

std::string Fragment::waiting_for_takers() const {
  for (const SendFlow& flow : flows_.sends()) {
    if (!flow.complete()) return members_.describe(flow.target) + " takes no data";
  }
  for (int i = 0; i < local_.count(); ++i) {
    if (needs(i)) return members_.describe(local_.rank(i)) + " has not finished it";
  }
  return "nothing";
}

Status Fragment::on_message(const wire::Header& h, const std::byte* payload) {
  auto source = static_cast<Rank>(h.source);
  bool sends = h.type != wire::Type::kReady;
  Signature ours = between_two(operation_->signature(), pair_bytes(source, sends));
  if (h.signature != ours) return disagreement(source, sends, h.signature, ours);
  if (h.type == wire::Type::kReady) {
    wire::Grant grant;
    bool granted = h.bytes == sizeof grant;
    if (granted) std::memcpy(&grant, payload, sizeof grant);
    return flows_.on_ready(source, h.offset, granted ? &grant : nullptr);
  }
  has_received_ = true;
  if (h.type == wire::Type::kWritten)
    return flows_.on_written(source, h.offset, {payload, h.bytes});
  std::byte values[transport::kEagerPayload];  // no coded message stands for more
  bool coded = h.raw_bytes > h.bytes, fits = !coded || h.raw_bytes <= sizeof values;
  ReceiveFlow* receive = fits ? flows_.on_data(source, h.offset, h.raw_bytes) : nullptr;
  if (receive == nullptr) {
    return {Code::kMismatch,
            members_.describe(source) + " sent data that is not part of this operation"};
  }
  if (coded) {
    if (Status s = flows_.decode(*receive, values, h.raw_bytes, payload, h.bytes); !s) return s;
    payload = values;
  }
  place(*receive, h.offset, payload, h.raw_bytes);
  return {};
}

void Fragment::follow_starts() {
  if (begin_ != 0 || gathers_sums_) return;
  starts_.begin(members_.ranks());
  for (int i = 0; i < local_.count(); ++i) starts_.await(local_.rank(i));
  for (const ReceiveFlow& receive : flows_.receives()) starts_.await(receive.source);
  for (const ReceiveFlow& receive : flows_.receives()) {
    bool early = remote_.is_known_to_have_started(receive.source, seq_);
    if (early && starts_.is_unseen(receive.source)) starts_.seen(receive.source, 0);
  }
}

// A rank publishes its first piece when it starts, and never waits for another rank with it.
void Fragment::look_at_inboxes() {
  uint64_t now = 0;
  for (int i = 0; i < local_.count(); ++i) {
    if (!starts_.is_unseen(local_.rank(i))) continue;
    const intranode::Piece* piece = head(i);
    if (piece == nullptr || piece->seq < seq_) continue;
    if (now == 0) now = now_ns();
    starts_.seen(local_.rank(i), now);
  }
}

void Fragment::on_start(Rank source, wire::Type type) {
  if (!starts_.is_unseen(source)) return;
  starts_.seen(source, now_ns(), starts_by_itself(flows_.receive_from(source), type));
}

// READYs and questions leave at the start of a fragment. Data of a later step may wait for that of an earlier
// one, and a sum for the other ranks of the sender's host.
bool Fragment::starts_by_itself(const ReceiveFlow* receive, wire::Type type) const {
  if (type != wire::Type::kData && type != wire::Type::kWritten) return true;
  const Topology& topology = members_.topology();
  Collective collective = operation_->signature().collective;
  // The hosts of a tree pass on what comes from the root.
  if (collective == Collective::kBroadcast && topology.nodes() > 2) return false;
  bool moves = collective == Collective::kAllGather || pairwise(collective);
  if (!moves && topology.ranks() > topology.nodes()) return false;
  return receive != nullptr && receive->step == flows_.receives()[0].step;
}

std::shared_ptr<Operation> Fragment::close() {
  starts_.count(tallies_, operation_->waited_from_ns.load(std::memory_order_relaxed));
  flows_.close();
  return std::move(operation_);
}

Rank Fragment::peer() const { return members_.rank() == 0 ? 1 : 0; }

// Of a message, as far as this rank has heard.
bool Fragment::peer_has_called() const {
  if (!is_message(operation_->collective) || has_received_) return true;
  return shape_.nodes > 1 && remote_.is_known_to_have_started(peer(), seq_);
}

std::string Fragment::describe() const {
  if (is_message(operation_->collective))
    return describe_message(*operation_, operation_->number(), members_.describe(peer()),
                            members_.group_name());
  return smddp::describe(operation_->signature()) + " #" + std::to_string(operation_->number()) +
         " of group '" + members_.group_name() + "'";
}

uint64_t Fragment::pair_bytes(Rank other, bool from_other) const {
  if (is_message(operation_->collective)) return operation_->signature().bytes;
  if (!pairwise(operation_->signature().collective)) return 0;
  return (from_other ? operation_->output : operation_->input).bytes(other);
}

Status Fragment::disagreement(Rank other_rank, bool other_sends, const Signature& theirs,
                              const Signature& ours) const {
  std::string other = members_.describe(other_rank), self = members_.describe(members_.rank());
  if (is_message(ours.collective)) other_sends = operation_->collective == Collective::kReceive;
  Signature sized_alike = theirs;
  sized_alike.bytes = ours.bytes;
  if (is_message(ours.collective) || (pairwise(ours.collective) && sized_alike == ours)) {
    auto bytes = [&](const Signature& s) {
      bool typed = is_message(ours.collective) && s.dtype != Dtype::kBytes;
      return " " + std::to_string(s.bytes) + " bytes" +
             (typed ? std::string(" of ") + name_of(s.dtype) : "");
    };
    std::string text =
        other_sends
            ? other + " sends" + bytes(theirs) + " to " + self + ", which takes" + bytes(ours)
            : self + " sends" + bytes(ours) + " to " + other + ", which takes" + bytes(theirs);
    return {Code::kMismatch, text + ", in " + describe()};
  }
  return {Code::kMismatch, smddp::disagreement(other, theirs, self, ours)};
}

Status Fragment::lost(int i) const {
  return {Code::kPeerLost, members_.describe(local_.rank(i)) + " (process " +
                               std::to_string(local_.inbox(i).pid()) + ") ended during " +
                               describe()};
}

bool Fragment::fail_piece(int i) {
  fail({Code::kInternal, members_.describe(local_.rank(i)) + " pushed a piece out of bounds"});
  return false;
}

void Fragment::fail_read(int i, const Status& why) {
  if (why.code() == Code::kPeerLost) return fail(lost(i));
  fail({why.code(), members_.describe(local_.rank(i)) + ": " + why.message()});
}

}  // namespace smddp
