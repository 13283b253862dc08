#include "collectives/round.h"

#include "collectives/communicator.h"

namespace smddp {
namespace {

// The longest message that libfabric's TCP providers send at once, without a rendezvous.
constexpr size_t kEagerMessage = 16 << 10;
// Offsets stay multiples of it, so that every element type lies whole in a message.
constexpr size_t kGrain = 64;

size_t payload_of(size_t message) { return (message - sizeof(wire::Header)) / kGrain * kGrain; }

}  // namespace

void Round::take(int i, const intranode::Piece& head) {
  if (head.last != 0) heard_[static_cast<size_t>(i)] = true;
  group_.pop(i);
}

void Round::open_flows(bool sends_at_once) {
  for (Inlet& inlet : inlets_) {
    if (sends_at_once && inlet.eager()) {
      auto back = std::find_if(outlets_.begin(), outlets_.end(),
                               [&](const Outlet& o) { return o.target == inlet.source; });
      if (back != outlets_.end() && back->eager() && clear_early(*back)) continue;
    }
    grant(inlet);
    widen(inlet, true);
  }
}

void Round::grant(Inlet& inlet) {
  if (inlet.eager() || inlet.memory == nullptr) return;
  fabric::Endpoint& endpoint = group_.endpoint();
  size_t chunk = std::min(operation_->plan().chunk_bytes, payload_of(endpoint.max_message()));
  inlet.granted = endpoint.open_landing(group_.peer(inlet.source), inlet.memory,
                                        inlet.stream.bytes(), chunk, &inlet, &inlet.grant);
}

bool Round::widen() {
  bool moved = false;
  for (Inlet& inlet : inlets_) {
    if (inlet.eager()) continue;
    size_t arrived = inlet.coverage.total();
    group_.window().close(arrived - inlet.counted);
    inlet.counted = arrived;
    if (inlet.allowed < inlet.stream.bytes()) moved |= widen(inlet, false);
  }
  return moved;
}

// Each of the round's senders has an equal part of the window; the oldest round has it in any case, so
// that something always moves. A step of less than a quarter of a part is not worth a message.
bool Round::widen(Inlet& inlet, bool first) {
  size_t before = inlet.allowed, bytes = inlet.stream.bytes();
  if (inlet.eager()) {
    inlet.allowed = bytes;
  } else {
    size_t chunk = inlet.granted ? inlet.grant.chunk_bytes : operation_->plan().chunk_bytes;
    size_t part = std::max(chunk, group_.window().bytes() / inlets_.size() / chunk * chunk);
    size_t wanted = std::min(bytes, (inlet.coverage.total() + part) / chunk * chunk);
    if (wanted < before + std::max(chunk, part / 4) && wanted < bytes) wanted = before;
    if (wanted > before && group_.window().open(wanted - before, group_.is_oldest(*this)))
      inlet.allowed = wanted;
  }
  if (!first && inlet.allowed == before) return false;
  group_.send_ready(*this, inlet.source, inlet.allowed, inlet.granted ? &inlet.grant : nullptr);
  return true;
}

void Round::remind() {
  for (Inlet& inlet : inlets_) {
    if (!inlet.coverage.complete())
      group_.send_ready(*this, inlet.source, inlet.allowed, inlet.granted ? &inlet.grant : nullptr);
  }
}

Status Round::on_ready(Rank source, uint64_t allowed, const wire::Grant* grant) {
  for (Outlet& outlet : outlets_) {
    if (outlet.target != source) continue;
    size_t bytes = outlet.stream.bytes();
    bool fits = allowed <= bytes;
    if (grant != nullptr && !outlet.granted && outlet.sent == 0) {
      fits = fits && grant->bytes == bytes && grant->chunk_bytes > 0 &&
             grant->chunk_bytes <= payload_of(group_.endpoint().max_message());
      outlet.granted = true;
      outlet.grant = *grant;
    }
    if (!fits) {
      return {Code::kMismatch,
              group_.describe(source) + " is ready for another flow than this rank's"};
    }
    outlet.cleared = true;
    outlet.allowed = std::max<size_t>(outlet.allowed, outlet.eager() ? bytes : allowed);
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
  if (!outlet.cleared && outlet.eager()) {
    outlet.cleared = group_.may_send_early(outlet.target, seq_, outlet.stream.bytes());
    if (outlet.cleared) outlet.allowed = outlet.stream.bytes();
  }
  return outlet.cleared;
}

size_t Round::step_of(const Outlet& outlet) const {
  if (outlet.granted) return outlet.grant.chunk_bytes;
  size_t longest = group_.endpoint().max_message();
  return payload_of(outlet.eager() ? std::min(longest, kEagerMessage) : longest);
}

bool Round::send_memory(Outlet& outlet, size_t bytes) {
  auto index = static_cast<uint32_t>(outlet.sent / outlet.grant.chunk_bytes);
  return group_.endpoint().send_chunk(group_.peer(outlet.target), outlet.grant, index,
                                      outlet.memory + outlet.sent, bytes, &outlet.pending);
}

fabric::SendBuffer* Round::acquire(const Outlet& outlet, std::byte** to) {
  fabric::SendBuffer* buffer = group_.endpoint().acquire(group_.peer(outlet.target), false);
  if (buffer != nullptr) *to = buffer->data + (outlet.granted ? 0 : sizeof(wire::Header));
  return buffer;
}

void Round::post(const Outlet& outlet, fabric::SendBuffer* buffer, size_t bytes) {
  if (outlet.granted) {
    auto index = static_cast<uint32_t>(outlet.sent / outlet.grant.chunk_bytes);
    group_.endpoint().post_chunk(buffer, outlet.grant, index, bytes);
  } else {
    group_.send_data(*this, buffer, outlet.sent, bytes);
  }
}

}  // namespace smddp
