#include "flows/remote_peers.h"

#include <algorithm>
#include <cstring>

#include "common/clock.h"

namespace smddp {
namespace {

// Bytes of early data that a group keeps at most, and how many of them one peer may send.
constexpr size_t kGroupCredit = 8 << 20;
constexpr size_t kPeerCredit = 256 << 10;
constexpr size_t kEarlyMessages = 65536;
// A message that is kept takes that much memory beside its bytes.
constexpr size_t kLeastCost = 128;
static_assert(kGroupCredit / kLeastCost <= kEarlyMessages);
// What it takes of the credit.
size_t cost_of(size_t bytes) { return std::max(bytes, kLeastCost); }
// Between two questions to a peer whether all messages to it have arrived.
constexpr uint64_t kAskLeavingNs = 200'000'000;

}  // namespace

RemotePeers::RemotePeers(const JobKey& key, const siphash::Key& message_key, Rank rank, int ranks,
                         transport::Transport* transport, size_t budget_bytes, int senders)
    : key_(key),
      message_key_(message_key),
      rank_(rank),
      transport_(transport),
      rails_text_(transport != nullptr ? transport->facts().rails : ""),
      position_(static_cast<size_t>(ranks), kNone),
      senders_(static_cast<size_t>(senders > 0 ? senders : ranks)),
      receive_budget_(budget_bytes) {
  abort_reason_.reserve(kReasonBytes);
}

void RemotePeers::add(Rank rank, transport::Peer peer) {
  ranks_.push_back(rank);
  unsent_aborts_.reserve(ranks_.capacity());
  position_[static_cast<size_t>(rank)] = static_cast<uint32_t>(peers_.size());
  peers_.emplace_back().address = peer;
}

// Counters may arrive in any order, as rails and providers reorder messages: a set of runs remembers all
// of them, in one run as long as none is missing.
bool RemotePeers::accept(const wire::Header& h, const std::byte* payload) {
  if (h.source >= position_.size() || h.target != static_cast<uint32_t>(rank_)) return false;
  uint32_t position = position_[h.source];
  bool accepted = position != kNone && h.mac == wire::mac_of(message_key_, h, payload) &&
                  peers_[position].seen.add(h.counter, 1);
  if (accepted) peers_[position].last_message_ns = recent_ns();
  return accepted;
}

uint64_t RemotePeers::has_started(Rank source, uint64_t seq) {
  RemotePeer& peer = of(source);
  uint64_t before = std::exchange(peer.heard, std::max(peer.heard, seq + 1));
  auto heard = peer.ahead.begin();
  for (; heard != peer.ahead.end() && heard->first < peer.heard; ++heard)
    peer.ahead_bytes -= heard->second;
  peer.ahead.erase(peer.ahead.begin(), heard);
  return before;
}

bool RemotePeers::keep_early(const wire::Header& h, const std::byte* payload) {
  size_t& kept = of(static_cast<Rank>(h.source)).kept_bytes;
  bool data = h.type == wire::Type::kData;
  if (!data && h.bytes > sizeof(wire::Grant)) return false;
  if (early_.size() == kEarlyMessages || (data && kept + h.bytes > credit())) return false;
  if (data) kept += h.bytes;
  early_.emplace(h.seq, Early{h, {payload, payload + h.bytes}});
  return true;
}

size_t RemotePeers::credit() const {
  return std::clamp(kGroupCredit / std::max<size_t>(1, senders_), kLeastCost, kPeerCredit);
}

// Never before the peer's first message of this group: until then the peer may still be making the
// group, and would drop the data as foreign. Fragments get credit in the order of their sequence
// numbers: the oldest fragment has credit once the peer was heard in the fragments before it, whatever
// later fragments ask for.
bool RemotePeers::may_send_early(Rank to, uint64_t seq, size_t bytes) {
  RemotePeer& peer = of(to);
  if (peer.heard > seq) return true;
  peer.refused.erase(peer.refused.begin(), peer.refused.lower_bound(peer.heard));
  bytes = cost_of(bytes);
  bool first = peer.refused.empty() || *peer.refused.begin() >= seq;
  if (!first || peer.heard == 0 || peer.ahead_bytes + bytes > credit()) {
    peer.refused.insert(seq);
    return false;
  }
  peer.refused.erase(seq);
  peer.ahead.emplace_back(seq, bytes);
  peer.ahead_bytes += bytes;
  return true;
}

// The first message gets a READY, as its sender has no credit before. After that, a sender without credit for its next
// message has sent more than half of the credit since the last READY that it has heard, that message counted: one of
// these gets a READY when this rank receives it.
bool RemotePeers::count_message(Rank source, size_t bytes) {
  RemotePeer& peer = of(source);
  peer.untold += cost_of(bytes);
  return !peer.greeted || peer.untold > credit() / 2;
}

wire::Header RemotePeers::header(wire::Type type, Rank to, uint64_t seq,
                                 const Signature& signature) const {
  wire::Header header{};
  header.magic = wire::kMagic;
  header.type = type;
  header.key = key_;
  header.seq = seq;
  header.source = static_cast<uint32_t>(rank_);
  header.target = static_cast<uint32_t>(to);
  header.signature = signature;
  return header;
}

void RemotePeers::post(transport::MessageBuffer* buffer, wire::Header header) {
  header.counter = of(static_cast<Rank>(header.target)).sent++;
  header.mac = wire::mac_of(message_key_, header, buffer->data + sizeof header);
  std::memcpy(buffer->data, &header, sizeof header);
  transport_->post(buffer, sizeof header + header.bytes);
}

void RemotePeers::send_ready(Rank to, uint64_t seq, const Signature& signature, uint64_t allowed,
                             const wire::Grant* grant) {
  Ready ready{to, header(wire::Type::kReady, to, seq, signature), {}};
  ready.header.offset = allowed;
  if (grant != nullptr) {
    ready.grant = *grant;
    ready.header.bytes = sizeof *grant;
  }
  bool alone = unsent_ready_.empty();
  unsent_ready_.push_back(ready);
  of(to).greeted = true;
  of(to).untold = 0;
  if (alone) flush_ready();  // else those before it have found no buffer, or wait for the next pass
}

// A peer that has no buffer holds up no other. To each, READYs go in their order.
bool RemotePeers::flush_ready() {
  ++flushes_;
  size_t kept = 0;
  for (size_t i = 0; i < unsent_ready_.size(); ++i) {
    const Ready& ready = unsent_ready_[i];
    RemotePeer& to = of(ready.to);
    transport::MessageBuffer* buffer =
        to.full_at == flushes_ ? nullptr : transport_->acquire(to.address, true);
    if (buffer == nullptr) {
      to.full_at = flushes_;
      if (kept != i) unsent_ready_[kept] = ready;
      ++kept;
      continue;
    }
    std::memcpy(buffer->data + sizeof(wire::Header), &ready.grant, sizeof ready.grant);
    post(buffer, ready.header);
  }
  bool moved = kept < unsent_ready_.size();
  unsent_ready_.resize(kept);
  return moved;
}

void RemotePeers::send_data(Rank to, transport::MessageBuffer* buffer, uint64_t seq,
                            const Signature& signature, uint64_t offset, size_t raw_bytes,
                            size_t bytes) {
  wire::Header h = header(wire::Type::kData, to, seq, signature);
  h.offset = offset;
  h.bytes = static_cast<uint32_t>(bytes);
  h.raw_bytes = static_cast<uint32_t>(raw_bytes);
  post(buffer, h);
}

bool RemotePeers::send(wire::Type type, Rank to, uint64_t seq, const Signature& signature,
                       uint64_t offset, std::span<const uint32_t> payload) {
  static_assert(sizeof(wire::Header) + wire::kMostTold * sizeof(uint32_t) <=
                transport::kControlMessage);
  transport::MessageBuffer* buffer = transport_->acquire(peer(to), true);
  if (buffer == nullptr) return false;
  wire::Header h = header(type, to, seq, signature);
  h.offset = offset;
  h.bytes = static_cast<uint32_t>(payload.size_bytes());
  std::ranges::copy(std::as_bytes(payload), buffer->data + sizeof h);
  post(buffer, h);
  return true;
}

void RemotePeers::on_peer_lost(transport::Peer peer) {
  for (Rank rank : ranks_) {
    RemotePeer& state = of(rank);
    if (state.address == peer) state.writes_closed = true;
  }
}

void RemotePeers::on_network_closed() {
  drop_unsent();
  for (RemotePeer& peer : peers_) peer.writes_closed = peer.told_closed = true;
}

bool RemotePeers::tell_closed(Rank to) {
  RemotePeer& state = of(to);
  state.told_closed = state.told_closed || send(wire::Type::kClosed, to, 0, {}, 0);
  return state.told_closed;
}

// The question's own counter is the last one.
void RemotePeers::heard_leaving(const wire::Header& h) {
  RemotePeer& source = of(static_cast<Rank>(h.source));
  source.taken = true;
  if (source.seen.prefix() > h.counter)
    send(wire::Type::kTaken, static_cast<Rank>(h.source), 0, {}, 0);
}

bool RemotePeers::all_taken(uint64_t now) {
  bool ask = now >= ask_leaving_ns_, all = true;
  if (ask) ask_leaving_ns_ = now + kAskLeavingNs;
  for (Rank rank : ranks_) {
    const RemotePeer& peer = of(rank);
    // One that writes no more is lost, or has given the group up.
    if (peer.sent == 0 || peer.taken || peer.silent || peer.writes_closed) continue;
    all = false;
    if (ask) send(wire::Type::kLeaving, rank, 0, {}, 0);
  }
  return all;
}

void RemotePeers::send_aborts(uint64_t from, const std::string& reason) {
  unsent_aborts_.assign(ranks_.begin(), ranks_.end());
  abort_from_ = from;
  abort_reason_.assign(reason, 0, kReasonBytes - 1);
}

void RemotePeers::flush_aborts() {
  unsent_ready_.clear();
  std::erase_if(unsent_aborts_, [&](Rank to) {
    transport::MessageBuffer* buffer = transport_->acquire(peer(to), true);
    if (buffer == nullptr) return false;
    wire::Header h = header(wire::Type::kAbort, to, abort_from_, {});
    h.bytes = static_cast<uint32_t>(abort_reason_.size());
    std::memcpy(buffer->data + sizeof h, abort_reason_.data(), abort_reason_.size());
    post(buffer, h);
    return true;
  });
}

}  // namespace smddp
