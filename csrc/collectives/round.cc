#include "collectives/round.h"

#include "collectives/communicator.h"
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
size_t slack(const Inlet& inlet) { return inlet.stream.bytes() / 8 * 5; }

// Where the ranks of a host together handle more bytes than this, little of them would still be in the
// caches when the caller reads them.
constexpr size_t kStreamedBytes = 24 << 20;

constexpr size_t payload_of(size_t message) {
  return (message - sizeof(wire::Header)) / kGrain * kGrain;
}
static_assert(payload_of(fabric::kEagerMessage) == fabric::kEagerPayload);

}  // namespace

bool Round::streams() const {
  auto here = static_cast<size_t>(group_.local_peers()) + 1;
  return operation_->signature().bytes * here >= kStreamedBytes;
}

std::vector<Extent> Round::readable(const Blocks& blocks, Rank block, size_t at, size_t bytes,
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

void Round::take(int i, const intranode::Piece& head) {
  if (head.last != 0) heard_[static_cast<size_t>(i)] = true;
  group_.pop(i);
}

Inlet* Round::add_inlet(const pattern::Flow& flow, Stream stream) {
  if (stream.bytes() == 0) return nullptr;
  size_t head = head_of(stream);
  return &inlets_.emplace_back(flow.peer, flow.step, std::move(stream), head);
}

Outlet* Round::add_outlet(const pattern::Flow& flow, Stream stream) {
  if (stream.bytes() == 0) return nullptr;
  Outlet& outlet = outlets_.emplace_back();
  outlet.target = flow.peer;
  outlet.step = flow.step;
  outlet.head = head_of(stream);
  outlet.stream = std::move(stream);
  return &outlet;
}

void Round::open_flows(bool sends_at_once) {
  keeps_step_ = group_.topology().nodes() > 2 && operation_->plan().pattern != Pattern::kLog &&
                std::any_of(inlets_.begin(), inlets_.end(),
                            [](const Inlet& inlet) { return inlet.stream.bytes() > kSmallFlow; });
  for (Outlet& outlet : outlets_) {
    if (outlet.eager()) clear_early(outlet);
  }
  for (Inlet& inlet : inlets_) {
    // Whoever has room for all of a flow needs no READY in the oldest round, and later ones follow.
    // Where data waits for its turn, it may wait for the very rank that it would tell: that one has to
    // know of this group already, and then it has that room.
    if (sends_at_once && inlet.eager() && inlet.stream.bytes() <= group_.credit() &&
        (!keeps_step_ || group_.has_greeted(inlet.source))) {
      auto back = std::find_if(outlets_.begin(), outlets_.end(),
                               [&](const Outlet& o) { return o.target == inlet.source; });
      if (back != outlets_.end() && back->eager() && back->cleared) continue;
    }
    grant(inlet);
    widen(inlet, true);
  }
}

// With large flows, the pattern's steps keep their order in time: what goes out in a step waits until
// enough of what comes in in the steps before is here. So each host sends to one other and
// receives from one, and no port of a switch has to hold two hosts' data while others idle. Whoever
// is late delays nobody more than by the time in which it has to send its own data anyway.
void Round::count_arrived() {
  while (arrived_ < inlets_.size()) {
    const Inlet& inlet = inlets_[arrived_];
    if (inlet.coverage.total() + slack(inlet) < inlet.stream.bytes()) break;
    ++arrived_;
  }
}

bool Round::has_turn(const Outlet& outlet) const {
  if (!keeps_step_) return true;
  if (arrived_ < inlets_.size() && inlets_[arrived_].step < outlet.step) return false;
  return group_.rails_are_free(*this);
}

void Round::grant(Inlet& inlet) {
  if (inlet.eager() || inlet.memory == nullptr) return;
  fabric::Endpoint& endpoint = group_.endpoint();
  size_t chunk = std::min(operation_->plan().chunk_bytes, payload_of(endpoint.max_message()));
  inlet.granted =
      endpoint.open_landing(group_.peer(inlet.source), inlet.memory + inlet.head,
                            inlet.stream.bytes() - inlet.head, chunk, &inlet, &inlet.grant);
}

bool Round::widen() {
  bool moved = false;
  count_arrived();
  for (Inlet& inlet : inlets_) {
    if (inlet.eager()) continue;
    size_t arrived = std::max(inlet.head, inlet.coverage.total());
    group_.window().close(arrived - inlet.counted);
    inlet.counted = arrived;
    if (inlet.allowed < inlet.stream.bytes()) moved |= widen(inlet, false);
  }
  return moved;
}

// A part of the window for each sender that has its turn, or will have it soon. Where the turn is this
// round's, one that has nothing under way gets a chunk in any case, so that something always moves.
// Less than a quarter of a part is not worth a message, but there: the later rounds that fill the window
// may wait for this very one.
bool Round::widen(Inlet& inlet, bool first) {
  size_t before = inlet.allowed, bytes = inlet.stream.bytes();
  if (!inlet.eager()) {
    size_t here = std::max(inlet.head, inlet.coverage.total());
    Window& window = group_.window();
    size_t chunk = inlet.granted ? inlet.grant.chunk_bytes : operation_->plan().chunk_bytes;
    size_t turns = keeps_step_ ? std::min<size_t>(kStepsAhead, inlets_.size()) : inlets_.size();
    size_t part = std::max(chunk, window.bytes() / turns);
    // Of the rounds that keep step, one has the turn, and the next one's first steps are prepared.
    bool now = keeps_step_ ? group_.rails_are_free(*this) : group_.is_oldest(*this);
    bool near = !keeps_step_ || arrived_ == inlets_.size() ||
                (inlet.step <= inlets_[arrived_].step + kStepsAhead &&
                 (now || group_.rails_soon_free(*this)));
    size_t wanted = std::min(here + part, before + window.room()) - inlet.head;
    wanted = inlet.head + wanted / chunk * chunk;
    bool idle = before == here && now;
    if (idle) wanted = std::max(wanted, before + chunk);
    wanted = near ? std::min(wanted, bytes) : before;
    size_t worth = idle ? chunk : std::max(chunk, part / 4);
    if ((wanted == bytes && wanted > before) || wanted >= before + worth) {
      window.open(wanted - before);
      inlet.allowed = wanted;
    }
  }
  if (!first && inlet.allowed == before) return false;
  say_ready(inlet);
  return true;
}

void Round::say_ready(const Inlet& inlet) {
  group_.send_ready(*this, inlet.source, inlet.allowed, inlet.granted ? &inlet.grant : nullptr);
}

void Round::remind() {
  for (Inlet& inlet : inlets_) {
    if (!inlet.coverage.complete()) say_ready(inlet);
  }
}

Status Round::on_ready(Rank source, uint64_t allowed, const wire::Grant* grant) {
  for (Outlet& outlet : outlets_) {
    if (outlet.target != source) continue;
    size_t bytes = outlet.stream.bytes();
    if (operation_->on_device && grant == nullptr) {
      return {Code::kUnavailable,
              group_.describe(source) + " could not have its NIC write into its GPU's memory"};
    }
    bool fits = allowed <= bytes;
    if (grant != nullptr && !outlet.granted && outlet.sent <= outlet.head) {
      fits = fits && wire::check(*grant, bytes - outlet.head) &&
             grant->chunk_bytes <= payload_of(group_.endpoint().max_message());
      outlet.granted = true;
      outlet.grant = *grant;
    }
    if (!fits) {
      return {Code::kMismatch,
              group_.describe(source) + " is ready for another flow than this rank's"};
    }
    outlet.cleared = true;
    outlet.allowed = std::max<size_t>(outlet.allowed, allowed);
  }
  return {};
}

Status Round::on_data(const wire::Header& header, const std::byte* payload) {
  auto source = static_cast<Rank>(header.source);
  for (Inlet& inlet : inlets_) {
    if (inlet.source != source) continue;
    if (!inlet.coverage.add(header.offset, header.bytes)) break;
    place(inlet, header.offset, payload, header.bytes);
    return {};
  }
  return {Code::kMismatch,
          group_.describe(source) + " sent data that is not part of this operation"};
}

bool Round::abandon() {
  bool entangled = false;
  for (Inlet& inlet : inlets_) {
    if (!std::exchange(inlet.granted, false)) continue;
    entangled = true;
    group_.endpoint().close_landing(inlet.grant.landing, false);
  }
  for (Outlet& outlet : outlets_) entangled = entangled || outlet.pending > 0;
  return entangled;
}

bool Round::flows_done() const {
  for (const Inlet& inlet : inlets_) {
    if (!inlet.coverage.complete()) return false;
  }
  for (const Outlet& outlet : outlets_) {
    if (!outlet.done()) return false;
  }
  return true;
}

void Round::close_flows() {
  for (Inlet& inlet : inlets_) {
    if (std::exchange(inlet.granted, false)) {
      group_.endpoint().close_landing(inlet.grant.landing, true);
    }
  }
}

bool Round::clear_early(Outlet& outlet) {
  if (!outlet.cleared && outlet.head > 0) {
    outlet.cleared = group_.may_send_early(outlet.target, seq_, outlet.head);
    if (outlet.cleared) outlet.allowed = outlet.head;
  }
  return outlet.cleared;
}

size_t Round::step_of(const Outlet& outlet) const {
  if (outlet.in_chunks()) return outlet.grant.chunk_bytes;
  size_t longest = group_.endpoint().max_message();
  if (outlet.sent >= outlet.head) return payload_of(longest);
  return std::min(outlet.head - outlet.sent, payload_of(std::min(longest, fabric::kEagerMessage)));
}

bool Round::send_memory(Outlet& outlet, size_t bytes) {
  auto index = static_cast<uint32_t>((outlet.sent - outlet.head) / outlet.grant.chunk_bytes);
  return group_.endpoint().send_chunk(group_.peer(outlet.target), outlet.grant, index,
                                      outlet.memory + outlet.sent, bytes, &outlet.pending);
}

fabric::SendBuffer* Round::acquire(const Outlet& outlet, std::byte** to) {
  fabric::SendBuffer* buffer = group_.endpoint().acquire(group_.peer(outlet.target), false);
  if (buffer != nullptr) *to = buffer->data + (outlet.in_chunks() ? 0 : sizeof(wire::Header));
  return buffer;
}

void Round::post(const Outlet& outlet, fabric::SendBuffer* buffer, size_t bytes) {
  if (outlet.in_chunks()) {
    auto index = static_cast<uint32_t>((outlet.sent - outlet.head) / outlet.grant.chunk_bytes);
    group_.endpoint().post_chunk(buffer, outlet.grant, index, bytes);
  } else {
    group_.send_data(*this, buffer, outlet.sent, bytes);
  }
}

}  // namespace smddp
