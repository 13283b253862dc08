// What a communicator's rounds exchange with other ranks: pieces through the node's outboxes, messages
// on the rails.
#include <algorithm>
#include <cstring>
#include <utility>

#include "collectives/group.h"
#include "intranode/arena.h"

namespace smddp {
namespace {

// Bytes of early data that a group holds at most, and of those what one peer may send.
constexpr size_t kGroupCredit = 8 << 20;
constexpr size_t kPeerCredit = 256 << 10;
constexpr size_t kEarlyMessages = 65536;

}  // namespace

const intranode::Piece* Group::head(int i, const Fragment& fragment) {
  const intranode::Piece* piece = inbox(i).head();
  if (!health_ || piece == nullptr || piece->seq != fragment.seq()) return nullptr;
  if (piece->signature == fragment.operation().signature_) return piece;
  fail({Code::kMismatch, describe(local_peer(i)) + " called " + smddp::describe(piece->signature) +
                             " while " + describe(rank_) + " called " +
                             smddp::describe(fragment.operation().signature_)});
  return nullptr;
}

void Group::push(const Fragment& fragment, intranode::Piece piece) {
  piece.seq = fragment.seq();
  piece.signature = fragment.operation().signature_;
  outbox_->publish(piece);
  pushed_since_wake_ = true;
}

size_t Group::reach(int i, size_t offset, const std::byte** at) {
  const intranode::Piece& piece = *inbox(i).head();
  if (piece.extents == 0) {
    *at = inbox(i).bytes() + offset;
    return piece.bytes - offset;
  }
  for (uint32_t e = 0; e < piece.extents; ++e) {
    const Extent& extent = inbox(i).extents()[e];
    if (offset < extent.bytes) {
      size_t bytes = extent.bytes - offset;
      *at = neighbors_[static_cast<size_t>(i)]->find(extent.address + offset, bytes);
      return *at == nullptr ? 0 : bytes;
    }
    offset -= extent.bytes;
  }
  return 0;
}

bool Group::shares(const std::vector<Extent>& extents) const {
  const intranode::Arena& arena = intranode::Arena::process();
  return std::all_of(extents.begin(), extents.end(), [&](const Extent& e) {
    return arena.may_own(e.address) && arena.contains(e.address, e.bytes);
  });
}

void Group::pop(int i) {
  inbox(i).pop();
  popped_since_wake_[static_cast<size_t>(i)] = true;
}

wire::Header Group::header(wire::Type type, uint64_t seq, const Signature& signature) const {
  return {wire::kMagic, type, {}, key_, seq, static_cast<uint32_t>(rank_), 0, 0, 0, signature};
}

void Group::post(fabric::SendBuffer* buffer, const wire::Header& header) {
  std::memcpy(buffer->data, &header, sizeof header);
  endpoint_->post(buffer, sizeof header + header.bytes);
}

void Group::send_ready(const Fragment& fragment, Rank to, uint64_t allowed,
                       const wire::Grant* grant) {
  Ready ready{to, header(wire::Type::kReady, fragment.seq(), fragment.operation().signature_), {}};
  ready.header.offset = allowed;
  if (grant != nullptr) {
    ready.grant = *grant;
    ready.header.bytes = sizeof *grant;
  }
  unsent_ready_.push_back(ready);
  remote_peers_[static_cast<size_t>(to)].greeted = true;
  flush_ready();
}

bool Group::flush_ready() {
  bool moved = false;
  while (!unsent_ready_.empty()) {
    const Ready& ready = unsent_ready_.front();
    fabric::SendBuffer* buffer = endpoint_->acquire(peer(ready.rank), true);
    if (buffer == nullptr) break;
    std::memcpy(buffer->data + sizeof(wire::Header), &ready.grant, sizeof ready.grant);
    post(buffer, ready.header);
    unsent_ready_.pop_front();
    moved = true;
  }
  return moved;
}

void Group::send_data(const Fragment& fragment, fabric::SendBuffer* buffer, uint64_t offset,
                      size_t bytes) {
  wire::Header h = header(wire::Type::kData, fragment.seq(), fragment.operation().signature_);
  h.offset = offset;
  h.bytes = bytes;
  post(buffer, h);
}

void Group::on_message(const wire::Header& h, const std::byte* data) {
  if (!health_ || h.source >= static_cast<uint32_t>(ranks())) return;
  if (h.type == wire::Type::kAbort) {
    if (h.seq < heard_abort_.from) {
      heard_abort_ = {h.seq, std::string(reinterpret_cast<const char*>(data),
                                         std::min<size_t>(h.bytes, kReasonBytes))};
    }
    return check_aborts();
  }
  RemotePeer& rail = remote_peers_[h.source];
  rail.heard = std::max(rail.heard, h.seq + 1);
  while (!rail.ahead.empty() && rail.ahead.front().first < rail.heard) {
    rail.ahead_bytes -= rail.ahead.front().second;
    rail.ahead.pop_front();
  }
  if (Fragment* fragment = active(h.seq)) {
    dispatch(*fragment, h, data);
  } else if (h.seq >= (queued_.empty() ? next_seq_ : queued_.front()->seq())) {
    keep_early(h, data);
  }  // else that round is over: it had nothing to send
}

void Group::dispatch(Fragment& fragment, const wire::Header& h, const std::byte* payload) {
  auto source = static_cast<Rank>(h.source);
  const Operation& op = fragment.operation();
  if (h.signature != op.signature_) {
    return fail({Code::kMismatch, describe(source) + " called " + smddp::describe(h.signature) +
                                      " while " + describe(rank_) + " called " +
                                      smddp::describe(op.signature_)});
  }
  Status taken;
  if (h.type == wire::Type::kReady) {
    wire::Grant grant;
    bool granted = h.bytes == sizeof grant;
    if (granted) std::memcpy(&grant, payload, sizeof grant);
    taken = fragment.on_ready(source, h.offset, granted ? &grant : nullptr);
  } else {
    taken = fragment.on_data(h, payload);
  }
  if (!taken) fail(taken);
}

void Group::keep_early(const wire::Header& h, const std::byte* payload) {
  size_t& kept = remote_peers_[h.source].kept_bytes;
  bool data = h.type == wire::Type::kData;
  if (early_.size() == kEarlyMessages || (data && kept + h.bytes > credit())) {
    return fail({Code::kInternal, describe(static_cast<Rank>(h.source)) + " is too far ahead"});
  }
  if (data) kept += h.bytes;
  early_.push_back({h, {payload, payload + h.bytes}});
}

// Every rail peer has the same room here, and knows it.
size_t Group::credit() const {
  return std::min(kPeerCredit, kGroupCredit / std::max<size_t>(1, static_cast<size_t>(ranks())));
}

// Not before a first message of this group: the peer may still be making it, and would take data for
// a stranger's. In the rounds' order: so the oldest round has room once the peer was heard in those
// before it, whatever later ones ask for.
bool Group::may_send_early(Rank to, uint64_t seq, size_t bytes) {
  RemotePeer& rail = remote_peers_[static_cast<size_t>(to)];
  if (rail.heard > seq) return true;
  rail.refused.erase(rail.refused.begin(), rail.refused.lower_bound(rail.heard));
  bool first = rail.refused.empty() || *rail.refused.begin() >= seq;
  if (!first || rail.heard == 0 || rail.ahead_bytes + bytes > credit()) {
    rail.refused.insert(seq);
    return false;
  }
  rail.refused.erase(seq);
  rail.ahead.emplace_back(seq, bytes);
  rail.ahead_bytes += bytes;
  return true;
}

void Group::on_peer_lost(fabric::Peer peer, const Status& why) {
  if (!health_) return;
  for (Rank rank : remote_ranks_) {
    if (peer_of_[static_cast<size_t>(rank)] != peer) continue;
    if (active_.empty()) continue;
    const Operation& op = active_.front()->operation();
    fail({Code::kPeerLost, "the connection to " + describe(rank) + " broke during " +
                               smddp::describe(op.signature_) + " #" + std::to_string(op.number_) +
                               " of group '" + options_.name + "': " + why.message()});
  }
}

void Group::flush_aborts() {
  std::string reason = health_.message().substr(0, kReasonBytes - 1);
  while (!unsent_abort_.empty()) {
    Rank to = unsent_abort_.back();
    fabric::SendBuffer* buffer = endpoint_->acquire(peer_of_[static_cast<size_t>(to)], true);
    if (buffer == nullptr) return;
    unsent_abort_.pop_back();
    wire::Header h = header(wire::Type::kAbort, gave_up_from_, {});
    h.bytes = reason.size();
    std::memcpy(buffer->data + sizeof h, reason.data(), reason.size());
    post(buffer, h);
  }
}

}  // namespace smddp
