#include "collectives/fragment.h"

#include "collectives/group.h"
#include "intranode/arena.h"

namespace smddp {
namespace {

// Offsets stay multiples of it, so that every element type lies whole in a message.
constexpr size_t kGrain = 64;
// Flows up to this size go out at once, whatever the steps: the start-ups cost more than queues.
constexpr size_t kSmallFlow = 4 << 10;
// What of a step is still to come when the next one may start. It covers the time until the processor
// that has to see to it is free, so that the link never idles; a whole step would let hosts get out of
// step, and two of them queue for a third.
size_t slack(const ReceiveFlow& receive) { return receive.run.bytes() / 8 * 5; }

// Where the ranks of a host together handle more bytes than this, little of them would still be in the
// caches when the caller reads them.
constexpr size_t kStreamedBytes = 24 << 20;

constexpr size_t payload_of(size_t message) {
  return (message - sizeof(wire::Header)) / kGrain * kGrain;
}
static_assert(payload_of(fabric::kEagerMessage) == fabric::kEagerPayload);

}  // namespace

bool Fragment::streams() const {
  auto here = static_cast<size_t>(group_.local_peers()) + 1;
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
  if (extents.size() > intranode::kSlotExtents || !(direct || group_.shares(extents)))
    extents.clear();
  return extents;
}

void Fragment::take(int i, const intranode::Piece& head) {
  if (head.last != 0) heard_[static_cast<size_t>(i)] = true;
  group_.pop(i);
}

ReceiveFlow* Fragment::add_receive_flow(const pattern::Flow& flow, ShardRun run) {
  if (run.bytes() == 0) return nullptr;
  size_t head = eager_prefix_of(run);
  return &receive_flows_.emplace_back(flow.peer, flow.step, std::move(run), head);
}

SendFlow* Fragment::add_send_flow(const pattern::Flow& flow, ShardRun run) {
  if (run.bytes() == 0) return nullptr;
  SendFlow& send = send_flows_.emplace_back();
  send.target = flow.peer;
  send.step = flow.step;
  send.eager_prefix = eager_prefix_of(run);
  send.run = std::move(run);
  return &send;
}

void Fragment::open_flows(bool sends_at_once) {
  keeps_step_ =
      group_.topology().nodes() > 2 && operation_->plan().pattern != Pattern::kLog &&
      std::any_of(receive_flows_.begin(), receive_flows_.end(),
                  [](const ReceiveFlow& receive) { return receive.run.bytes() > kSmallFlow; });
  for (SendFlow& send : send_flows_) {
    if (send.eager()) clear_early(send);
  }
  for (ReceiveFlow& receive : receive_flows_) {
    // Whoever has room for all of a flow needs no READY in the oldest round, and later ones follow.
    // Where data waits for its turn, it may wait for the very rank that it would tell: that one has to
    // know of this group already, and then it has that room.
    if (sends_at_once && receive.eager() && receive.run.bytes() <= group_.credit() &&
        (!keeps_step_ || group_.has_greeted(receive.source))) {
      auto back = std::find_if(send_flows_.begin(), send_flows_.end(),
                               [&](const SendFlow& o) { return o.target == receive.source; });
      if (back != send_flows_.end() && back->eager() && back->cleared) continue;
    }
    grant(receive);
    widen(receive, true);
  }
}

// With large flows, the pattern's steps keep their order in time: what goes out in a step waits until
// enough of what comes in in the steps before is here. So each host sends to one other and
// receives from one, and no port of a switch has to hold two hosts' data while others idle. Whoever
// is late delays nobody more than by the time in which it has to send its own data anyway.
void Fragment::count_arrived() {
  while (arrived_ < receive_flows_.size()) {
    const ReceiveFlow& receive = receive_flows_[arrived_];
    if (receive.coverage.total() + slack(receive) < receive.run.bytes()) break;
    ++arrived_;
  }
}

bool Fragment::has_turn(const SendFlow& send) const {
  if (!keeps_step_) return true;
  if (arrived_ < receive_flows_.size() && receive_flows_[arrived_].step < send.step) return false;
  return group_.rails_are_free(*this);
}

void Fragment::grant(ReceiveFlow& receive) {
  if (receive.eager() || receive.memory == nullptr) return;
  fabric::Endpoint& endpoint = group_.endpoint();
  size_t chunk = std::min(operation_->plan().chunk_bytes, payload_of(endpoint.max_message()));
  receive.granted = endpoint.open_region(
      group_.peer(receive.source), receive.memory + receive.eager_prefix,
      receive.run.bytes() - receive.eager_prefix, chunk, &receive, &receive.grant);
}

bool Fragment::widen() {
  bool moved = false;
  count_arrived();
  for (ReceiveFlow& receive : receive_flows_) {
    if (receive.eager()) continue;
    size_t arrived = std::max(receive.eager_prefix, receive.coverage.total());
    group_.receive_budget().close(arrived - receive.counted);
    receive.counted = arrived;
    if (receive.allowed < receive.run.bytes()) moved |= widen(receive, false);
  }
  return moved;
}

// A part of the window for each sender that has its turn, or will have it soon. Where the turn is this
// round's, one that has nothing under way gets a chunk in any case, so that something always moves.
// Less than a quarter of a part is not worth a message, but there: the later rounds that fill the window
// may wait for this very one.
bool Fragment::widen(ReceiveFlow& receive, bool first) {
  size_t before = receive.allowed, bytes = receive.run.bytes();
  if (!receive.eager()) {
    size_t here = std::max(receive.eager_prefix, receive.coverage.total());
    ReceiveBudget& window = group_.receive_budget();
    size_t chunk = receive.granted ? receive.grant.chunk_bytes : operation_->plan().chunk_bytes;
    size_t turns =
        keeps_step_ ? std::min<size_t>(kStepsAhead, receive_flows_.size()) : receive_flows_.size();
    size_t part = std::max(chunk, window.bytes() / turns);
    // Of the rounds that keep step, one has the turn, and the next one's first steps are prepared.
    bool now = keeps_step_ ? group_.rails_are_free(*this) : group_.is_oldest(*this);
    bool near = !keeps_step_ || arrived_ == receive_flows_.size() ||
                (receive.step <= receive_flows_[arrived_].step + kStepsAhead &&
                 (now || group_.rails_soon_free(*this)));
    size_t wanted = std::min(here + part, before + window.room()) - receive.eager_prefix;
    wanted = receive.eager_prefix + wanted / chunk * chunk;
    bool idle = before == here && now;
    if (idle) wanted = std::max(wanted, before + chunk);
    wanted = near ? std::min(wanted, bytes) : before;
    size_t worth = idle ? chunk : std::max(chunk, part / 4);
    if ((wanted == bytes && wanted > before) || wanted >= before + worth) {
      window.open(wanted - before);
      receive.allowed = wanted;
    }
  }
  if (!first && receive.allowed == before) return false;
  say_ready(receive);
  return true;
}

void Fragment::say_ready(const ReceiveFlow& receive) {
  group_.send_ready(*this, receive.source, receive.allowed,
                    receive.granted ? &receive.grant : nullptr);
}

void Fragment::remind() {
  for (ReceiveFlow& receive : receive_flows_) {
    if (!receive.coverage.complete()) say_ready(receive);
  }
}

Status Fragment::on_ready(Rank source, uint64_t allowed, const wire::Grant* grant) {
  for (SendFlow& send : send_flows_) {
    if (send.target != source) continue;
    size_t bytes = send.run.bytes();
    if (operation_->on_device && grant == nullptr) {
      return {Code::kUnavailable,
              group_.describe(source) + " could not have its NIC write into its GPU's memory"};
    }
    bool fits = allowed <= bytes;
    if (grant != nullptr && !send.granted && send.sent <= send.eager_prefix) {
      fits = fits && wire::check(*grant, bytes - send.eager_prefix) &&
             grant->chunk_bytes <= payload_of(group_.endpoint().max_message());
      send.granted = true;
      send.grant = *grant;
    }
    if (!fits) {
      return {Code::kMismatch,
              group_.describe(source) + " is ready for another flow than this rank's"};
    }
    send.cleared = true;
    send.allowed = std::max<size_t>(send.allowed, allowed);
  }
  return {};
}

Status Fragment::on_data(const wire::Header& header, const std::byte* payload) {
  auto source = static_cast<Rank>(header.source);
  for (ReceiveFlow& receive : receive_flows_) {
    if (receive.source != source) continue;
    if (!receive.coverage.add(header.offset, header.bytes)) break;
    place(receive, header.offset, payload, header.bytes);
    return {};
  }
  return {Code::kMismatch,
          group_.describe(source) + " sent data that is not part of this operation"};
}

bool Fragment::abandon() {
  bool entangled = false;
  for (ReceiveFlow& receive : receive_flows_) {
    if (!std::exchange(receive.granted, false)) continue;
    entangled = true;
    group_.endpoint().close_region(receive.grant.region, false);
  }
  for (SendFlow& send : send_flows_) entangled = entangled || send.pending > 0;
  return entangled;
}

bool Fragment::flows_done() const {
  for (const ReceiveFlow& receive : receive_flows_) {
    if (!receive.coverage.complete()) return false;
  }
  for (const SendFlow& send : send_flows_) {
    if (!send.done()) return false;
  }
  return true;
}

void Fragment::close_flows() {
  for (ReceiveFlow& receive : receive_flows_) {
    if (std::exchange(receive.granted, false)) {
      group_.endpoint().close_region(receive.grant.region, true);
    }
  }
}

bool Fragment::clear_early(SendFlow& send) {
  if (!send.cleared && send.eager_prefix > 0) {
    send.cleared = group_.may_send_early(send.target, seq_, send.eager_prefix);
    if (send.cleared) send.allowed = send.eager_prefix;
  }
  return send.cleared;
}

size_t Fragment::step_of(const SendFlow& send) const {
  if (send.in_chunks()) return send.grant.chunk_bytes;
  size_t longest = group_.endpoint().max_message();
  if (send.sent >= send.eager_prefix) return payload_of(longest);
  return std::min(send.eager_prefix - send.sent,
                  payload_of(std::min(longest, fabric::kEagerMessage)));
}

bool Fragment::send_memory(SendFlow& send, size_t bytes) {
  auto index = static_cast<uint32_t>((send.sent - send.eager_prefix) / send.grant.chunk_bytes);
  return group_.endpoint().send_chunk(group_.peer(send.target), send.grant, index,
                                      send.memory + send.sent, bytes, &send.pending);
}

fabric::SendBuffer* Fragment::acquire(const SendFlow& send, std::byte** to) {
  fabric::SendBuffer* buffer = group_.endpoint().acquire(group_.peer(send.target), false);
  if (buffer != nullptr) *to = buffer->data + (send.in_chunks() ? 0 : sizeof(wire::Header));
  return buffer;
}

void Fragment::post(const SendFlow& send, fabric::SendBuffer* buffer, size_t bytes) {
  if (send.in_chunks()) {
    auto index = static_cast<uint32_t>((send.sent - send.eager_prefix) / send.grant.chunk_bytes);
    group_.endpoint().post_chunk(buffer, send.grant, index, bytes);
  } else {
    group_.send_data(*this, buffer, send.sent, bytes);
  }
}

}  // namespace smddp
