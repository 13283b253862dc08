// Peers, messages and progress. Nothing here allocates, locks or formats per message.
#include "fabric/rail_set.h"

#include <algorithm>
#include <bit>
#include <cassert>

#include "common/log.h"
#include "fabric/address.h"

namespace smddp::fabric {
namespace {

constexpr int kBatches = 4;  // per rail and progress(), so that retries get their turn
constexpr int kShortSleepMs = 5;

}  // namespace

Result<Peer> RailSet::add_peer(const std::vector<uint8_t>& address) {
  size_t name_size = rails_[0]->name().size();
  Result<PublishedAddress> published = unpack_address(rails_[0]->info(), address, name_size);
  if (!published) return published.status();
  const std::vector<std::vector<uint8_t>>& names = published.value().names;
  std::string key(address.begin(), address.end());
  if (auto found = known_.find(key); found != known_.end()) return found->second;

  PeerState peer;
  peer.addresses.fill(FI_ADDR_UNSPEC);
  peer.rails = names.size();
  peer.takes_chunks = transfer_ != Transfer::kMessages && published.value().transfer == transfer_;
  for (size_t ours = 0; ours < rails_.size(); ++ours) {
    for (size_t theirs = 0; theirs < names.size(); ++theirs) {
      bool sends_to = ours % names.size() == theirs, written_by = theirs % rails_.size() == ours;
      if (!sends_to && !written_by) continue;
      Result<fi_addr_t> inserted = rails_[ours]->insert(names[theirs]);
      if (!inserted) return inserted.status();
      if (sends_to) peer.addresses[ours] = inserted.value();
    }
  }
  peers_.push_back(peer);
  stalled_.reserve(peers_.size());
  Peer index = static_cast<Peer>(peers_.size() - 1);
  known_.emplace(std::move(key), index);
  return index;
}

// Dynamic threshold (Choudhury and Hahne, 1998) with factor 1.
SendBuffer* RailSet::acquire(Peer to, bool control) {
  assert(to < peers_.size());
  PeerState& peer = peers_[to];
  SlotQueue<SendSlot>& free = free_[control];
  if (peer.held[control] >= free.size()) return nullptr;
  SendSlot* slot = free.pop();
  slot->to = to;
  ++peer.held[control];
  return slot;
}

void RailSet::release(SendBuffer* buffer) {
  SendSlot* slot = static_cast<SendSlot*>(buffer);
  --peers_[slot->to].held[slot->control];
  free_[slot->control].push_front(slot);  // the next message finds it in the cache
}

void RailSet::take_back(SendSlot* slot) {
  --posted_;
  release(slot);
}

void RailSet::finish(SendSlot* slot) {
  balance_.finished(slot->rail, slot->size);
  take_back(slot);
}

void RailSet::post(SendBuffer* buffer, size_t size) {
  assert(size <= buffer->capacity);
  SendSlot* slot = static_cast<SendSlot*>(buffer);
  slot->size = size;
  slot->chunk = false;
  enqueue(slot);
}

void RailSet::enqueue(SendSlot* slot) {
  PeerState& peer = peers_[slot->to];
  ++posted_;
  if (peer.lost) return take_back(slot);
  if (peer.waiting.empty() && try_send(slot) == 0) return;
  peer.waiting.push(slot);
  if (!peer.listed) {
    peer.listed = true;
    stalled_.push_back(slot->to);
  }
}

int RailSet::try_send(SendSlot* slot) {
  const PeerState& peer = peers_[slot->to];
  size_t rail;
  ssize_t rc;
  if (slot->chunk) {
    rail = rail_of_chunk(peer, slot->index);
    rc = start_chunk(slot, peer, rail, slot->grant, slot->index, slot->data, slot->size,
                     rails_[rail]->sends_descriptor());
  } else {
    rail = balance_.choose();
    rc = rails_[rail]->send(slot, peer.addresses[rail], slot->data, slot->size);
  }
  if (rc == 0) {
    balance_.sent(rail, slot->size);
    ++(slot->chunk ? counters_.chunks_sent : counters_.messages_sent);
    (slot->chunk ? counters_.chunk_bytes_sent : counters_.bytes_sent) += slot->size;
    return 0;
  }
  if (rc == -FI_EAGAIN) {
    ++counters_.retries;
    return -FI_EAGAIN;
  }
  Peer to = slot->to;
  take_back(slot);
  lose(to, "a message could not be sent: " + library_.error_text(static_cast<int>(rc)) + " (" +
               rails_[rail]->text() + ")");
  return 0;
}

void RailSet::retry_stalled(int& handled) {
  size_t kept = 0;
  for (size_t i = 0; i < stalled_.size(); ++i) {
    PeerState& peer = peers_[stalled_[i]];
    while (!peer.waiting.empty()) {
      SendSlot* slot = peer.waiting.pop();
      if (try_send(slot) != 0) {
        peer.waiting.push_front(slot);
        break;
      }
      ++handled;
    }
    if (peer.waiting.empty()) {
      peer.listed = false;
    } else {
      stalled_[kept++] = stalled_[i];
    }
  }
  stalled_.resize(kept);
}

void RailSet::lose(Peer peer, const std::string& why) {
  PeerState& state = peers_[peer];
  if (state.lost) return;
  state.lost = true;
  while (!state.waiting.empty()) take_back(state.waiting.pop());
  losses_.push_back({peer, Status(Code::kPeerLost, why)});
}

void RailSet::handle_failure(Rail& rail, const Event& event) {
  std::string why = rail.error() + " (" + rail.text() + ")";
  if (event.slot != nullptr && event.slot->operation == Operation::kSend) {
    SendSlot* slot = static_cast<SendSlot*>(event.slot);
    Peer to = slot->to;
    finish(slot);
    return lose(to, "a message could not be sent: " + why);
  }
  if (event.slot != nullptr && event.slot->operation == Operation::kChunkSend) {
    ChunkSendSlot* slot = static_cast<ChunkSendSlot*>(event.slot);
    Peer to = slot->to;
    finish(slot);
    return lose(to, "a chunk could not be sent: " + why);
  }
  if (event.slot != nullptr && event.slot->operation == Operation::kFlush) {
    ReceiveRegion* region = end_flush(static_cast<FlushSlot*>(event.slot));
    if (region != nullptr) lose(region->from, "a device's memory could not be flushed: " + why);
    return;
  }
  ++counters_.receive_errors;
  if (std::has_single_bit(counters_.receive_errors)) {
    log(LogLevel::kWarning,
        "fabric: receive error " + std::to_string(counters_.receive_errors) + ": " + why);
  }
  if (event.slot == nullptr) return;
  if (event.slot->operation == Operation::kChunkReceive) {
    forget_expected(static_cast<ChunkReceiveSlot*>(event.slot));
  } else {
    rail.repost(static_cast<ReceiveSlot*>(event.slot));
  }
}

void RailSet::handle(Rail& rail, const Event& event, Sink& sink) {
  if (event.kind == Event::kWritten) {
    if (event.slot != nullptr) rail.repost(static_cast<ReceiveSlot*>(event.slot));
    return chunk_arrived(wire::region_of(event.immediate), wire::chunk_of(event.immediate));
  }
  if (event.kind == Event::kFailed) return handle_failure(rail, event);
  switch (event.slot->operation) {
    case Operation::kReceive: {
      ReceiveSlot* slot = static_cast<ReceiveSlot*>(event.slot);
      ++counters_.messages_received;
      counters_.bytes_received += event.bytes;
      sink.on_message(slot->data, std::min(event.bytes, max_message_));
      return rail.repost(slot);
    }
    case Operation::kSend:
      return finish(static_cast<SendSlot*>(event.slot));
    case Operation::kChunkSend:
      return finish(static_cast<ChunkSendSlot*>(event.slot));
    case Operation::kChunkReceive:
      return chunk_received(static_cast<ChunkReceiveSlot*>(event.slot), event.bytes);
    case Operation::kFlush:
      return flushed(static_cast<FlushSlot*>(event.slot));
  }
}

Result<int> RailSet::progress(Sink& sink) {
  int handled = 0;
  for (std::unique_ptr<Rail>& rail : rails_) {
    if (Status status = rail->repost_refused(); !status) return status;
    for (int batch = 0; batch < kBatches; ++batch) {
      std::array<Event, Rail::kBatch> events;
      Result<size_t> reaped = rail->poll(events);
      if (!reaped) return reaped.status();
      size_t count = reaped.value();
      for (size_t i = 0; i < count; ++i) handle(*rail, events[i], sink);
      handled += static_cast<int>(count);
      // After an error, which comes alone, there may be more.
      bool more = count == Rail::kBatch || (count == 1 && events[0].kind == Event::kFailed);
      if (!more) break;
    }
  }
  retry_stalled(handled);
  for (size_t n = short_regions_.size(); n > 0; --n) {
    uint32_t number = short_regions_.front();
    short_regions_.erase(short_regions_.begin());
    expect_chunks(regions_.at(number));
  }
  for (size_t n = unflushed_.size(); n > 0; --n) {
    uint32_t number = unflushed_.front();
    unflushed_.erase(unflushed_.begin());
    if (ReceiveRegion* region = regions_.find(number)) flush(*region);
  }
  // The sink may post, and so lose a peer more: told next time.
  if (losses_.empty()) return handled;
  std::vector<Loss> losses = std::exchange(losses_, {});
  for (const Loss& loss : losses) sink.on_peer_lost(loss.peer, loss.why);
  return handled + static_cast<int>(losses.size());
}

bool RailSet::may_sleep() {
  if (wait_fd_ < 0 || !losses_.empty() || !short_regions_.empty() || !unflushed_.empty())
    return false;
  return std::all_of(rails_.begin(), rails_.end(), [](auto& rail) { return rail->may_sleep(); });
}

int RailSet::sleep_limit_ms() const {
  bool unsure = std::any_of(rails_.begin(), rails_.end(),
                            [](const auto& rail) { return rail->loses_wakeups(); });
  return unsure || !stalled_.empty() ? kShortSleepMs : -1;
}

}  // namespace smddp::fabric
