// ReceiveRegions and the chunks that fill them. Nothing here allocates, locks or formats per chunk, but
// where a provider has memory registered for each use.
#include <sys/random.h>

#include <algorithm>
#include <cassert>

#include "fabric/rail_set.h"

namespace smddp::fabric {
namespace {

constexpr uint32_t kFewestExpected = 8;
constexpr size_t kFlushBytes = 8;

// A stale or foreign message must not match a region that it was not meant for.
uint32_t random_tag() {
  uint32_t tag = 0;
  if (::getrandom(&tag, sizeof tag, 0) != sizeof tag) return 0x5bd1e995;
  return tag;
}

uint64_t tag_of(uint32_t upper, uint32_t region, uint32_t chunk) {
  return uint64_t{upper} << 32 | wire::immediate(region, chunk);
}

}  // namespace

// ---- sending

// Writes land wherever there is a key. A tagged chunk must come to the rail that expects it.
size_t RailSet::rail_of_chunk(const PeerState& peer, uint32_t index) {
  if (transfer_ == Transfer::kTagged) return index % std::min(rails_.size(), peer.rails);
  return balance_.choose();
}

ssize_t RailSet::start_chunk(Slot* slot, const PeerState& peer, size_t rail,
                             const wire::Grant& grant, uint32_t index, const std::byte* data,
                             size_t bytes, void* descriptor) {
  if (transfer_ == Transfer::kTagged) {
    return rails_[rail]->send_tagged(
        slot, peer.addresses[rail], data, bytes, descriptor,
        tag_of(static_cast<uint32_t>(grant.keys[0]), grant.region, index));
  }
  uint64_t address = grant.address + uint64_t{index} * grant.chunk_bytes;
  return rails_[rail]->write(slot, peer.addresses[rail], data, bytes, descriptor, address,
                             grant.keys[rail % peer.rails], wire::immediate(grant.region, index));
}

bool RailSet::send_chunk(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data,
                         size_t bytes, uint32_t* pending) {
  assert(to < peers_.size() && bytes <= grant.chunk_bytes);
  PeerState& peer = peers_[to];
  if (peer.lost) return true;
  // Behind what waits already, and with the threshold of acquire().
  size_t share = std::min(kChunkSendsPerPeer, free_chunk_sends_.size());
  if (!peer.waiting.empty() || peer.chunks >= share) return false;
  size_t rail = rail_of_chunk(peer, index);
  ChunkSendSlot* slot = free_chunk_sends_.pop();
  slot->registration = nullptr;
  ssize_t rc = 0;
  bool registers =
      rails_[rail]->local_registration() || rails_[rail]->registrations().is_lent(data);
  if (registers) {
    slot->registration = rails_[rail]->registrations().take(data, bytes, Access::kSend);
    if (slot->registration == nullptr) rc = -FI_ENOMEM;
  }
  if (rc == 0) {
    void* descriptor = slot->registration != nullptr ? slot->registration->descriptor() : nullptr;
    rc = start_chunk(slot, peer, rail, grant, index, data, bytes, descriptor);
  }
  if (rc == 0) {
    slot->to = to;
    slot->size = bytes;
    slot->pending = pending;
    ++*pending;
    ++peer.chunks;
    ++posted_;
    balance_.sent(rail, bytes);
    ++counters_.chunks_sent;
    counters_.chunk_bytes_sent += bytes;
    return true;
  }
  bool unregistered = registers && slot->registration == nullptr;
  if (slot->registration != nullptr) rails_[rail]->registrations().give_back(slot->registration);
  free_chunk_sends_.push_front(slot);
  if (rc == -FI_EAGAIN) {
    ++counters_.retries;
    return false;
  }
  // The limit on pinned memory may let go once other chunks are through.
  if (unregistered && peer.chunks > 0) return false;
  lose(to, "a chunk could not be sent: " +
               (unregistered ? rails_[rail]->registrations().error().message()
                             : library_.error_text(static_cast<int>(rc))) +
               " (" + rails_[rail]->text() + ")");
  return true;
}

void RailSet::finish(ChunkSendSlot* slot) {
  balance_.finished(slot->rail, slot->size);
  --posted_;
  --peers_[slot->to].chunks;
  --*slot->pending;
  if (slot->registration != nullptr) {
    rails_[slot->rail]->registrations().give_back(slot->registration);
  }
  free_chunk_sends_.push_front(slot);
}

void RailSet::post_chunk(SendBuffer* buffer, const wire::Grant& grant, uint32_t index,
                         size_t bytes) {
  assert(bytes <= buffer->capacity && bytes <= grant.chunk_bytes);
  SendSlot* slot = static_cast<SendSlot*>(buffer);
  slot->size = bytes;
  slot->chunk = true;
  slot->grant = grant;
  slot->index = index;
  enqueue(slot);
}

// ---- receiving

bool RailSet::open_region(Peer from, std::byte* memory, size_t bytes, size_t chunk_bytes,
                          ChunkObserver* observer, wire::Grant* grant) {
  assert(from < peers_.size());
  if (peers_[from].lost || !peers_[from].takes_chunks || chunk_bytes > max_chunk_) return false;
  ReceiveRegion* region = regions_.open(from, memory, bytes, chunk_bytes, observer);
  if (region == nullptr) return false;
  region->lent = rails_[0]->registrations().is_lent(memory);
  if (!register_region(*region)) {
    regions_.close(region, true);
    return false;
  }
  *grant = {};
  grant->region = region->number;
  grant->chunk_bytes = static_cast<uint32_t>(chunk_bytes);
  grant->bytes = bytes;
  if (transfer_ == Transfer::kWrites) {
    grant->address = remote_address(*region);
    for (size_t i = 0; i < rails_.size(); ++i) grant->keys[i] = region->registrations[i]->key;
  } else {
    grant->keys[0] = region->tag = random_tag();
    region->window = static_cast<uint32_t>(
        std::min({size_t{region->chunks}, kChunkReceivesPerRegion, free_chunk_receives_.size()}));
    expect_chunks(*region);
  }
  return true;
}

// What those that have its key call it.
uint64_t RailSet::remote_address(const ReceiveRegion& region) const {
  auto at = reinterpret_cast<uintptr_t>(region.memory);
  return virtual_addresses_ ? at : at - region.registrations[0]->base();
}

bool RailSet::register_region(ReceiveRegion& region) {
  bool writes = transfer_ == Transfer::kWrites;
  if (!writes && free_chunk_receives_.size() < std::min(region.chunks, kFewestExpected)) {
    return false;
  }
  if (!writes && !rails_[0]->local_registration()) return true;
  for (size_t i = 0; i < rails_.size(); ++i) {
    region.registrations[i] = rails_[i]->registrations().take(
        region.memory, region.bytes, writes ? Access::kRemoteWrite : Access::kReceive);
    if (region.registrations[i] != nullptr) continue;
    while (i-- > 0) rails_[i]->registrations().give_back(region.registrations[i]);
    return false;
  }
  return true;
}

// A region that is closed too early goes on taking what its sender still sends; only nobody hears of
// it. Revoking the key, or cancelling the receives, would do harm instead: tcp and verbs break the
// connection on a write without a key, and with it everything else between the two; a tagged message
// that nobody expects stops a tcp connection, and its sender never gets its buffer back.
void RailSet::close_region(uint32_t number, bool complete) {
  ReceiveRegion* region = regions_.find(number);
  if (region == nullptr) return;
  complete = complete && region->missing == 0;
  regions_.close(region, complete);
  if (!complete) return;
  for (size_t i = 0; i < rails_.size(); ++i) {
    Registration* registration = region->registrations[i];
    if (registration != nullptr) rails_[i]->registrations().give_back(registration);
  }
}

// Chunks of a region are sent in rising order, no more than kChunkSendsPerPeer at once: so the
// window always holds what comes next, and nothing piles up in the provider.
void RailSet::expect_chunks(ReceiveRegion& region) {
  const size_t rails = std::min(rails_.size(), peers_[region.from].rails);
  while (region.next < region.chunks && region.expected < region.window) {
    ChunkReceiveSlot* slot = free_chunk_receives_.empty() ? nullptr : free_chunk_receives_.pop();
    if (slot == nullptr) break;
    uint32_t index = region.next;
    size_t rail = index % rails;
    Registration* registration = region.registrations[rail];
    ssize_t rc = rails_[rail]->receive_tagged(
        slot, region.memory + size_t{index} * region.chunk_bytes, region.size_of(index),
        registration != nullptr ? registration->descriptor() : nullptr,
        tag_of(region.tag, region.number, index));
    if (rc != 0) {
      free_chunk_receives_.push_front(slot);
      ++counters_.retries;
      break;
    }
    slot->region = region.number;
    slot->index = index;
    ++region.expected;
    ++region.next;
  }
  if (region.next < region.chunks && region.expected < region.window) {
    short_regions_.push_back(region.number);
  }
}

void RailSet::forget_expected(ChunkReceiveSlot* slot) {
  --regions_.at(slot->region).expected;
  free_chunk_receives_.push_front(slot);
}

void RailSet::chunk_received(ChunkReceiveSlot* slot, size_t bytes) {
  uint32_t number = slot->region, index = slot->index;
  forget_expected(slot);
  ReceiveRegion& region = regions_.at(number);
  expect_chunks(region);
  if (bytes == region.size_of(index)) return chunk_arrived(number, index);
  ++counters_.foreign_chunks;
}

void RailSet::chunk_arrived(uint32_t number, uint32_t index) {
  ReceiveRegion* region = regions_.find(number);
  if (region == nullptr || !ReceiveRegionTable::arrive(*region, index)) {
    ++counters_.foreign_chunks;
    return;
  }
  ++counters_.chunks_received;
  if (region->lent && region->missing == 0) {
    region->last = index;
    return flush(*region);
  }
  region->observer->on_chunk(index);
}

// ---- devices' memory

Status RailSet::reaches(const MemoryOwner& owner) const {
  if (transfer_ != Transfer::kWrites) {
    return {Code::kUnavailable, description_ + " moves no chunks by writes"};
  }
  for (const auto& rail : rails_) {
    if (owner.kind == MemoryOwner::Kind::kHost || rail->reaches_devices()) continue;
    return {Code::kUnavailable,
            rail->text() + " does not reach a GPU's memory by itself (FI_HMEM)"};
  }
  return {};
}

Status RailSet::lend(std::byte* at, size_t bytes, const MemoryOwner& owner) {
  if (Status able = reaches(owner); !able) return able;
  if (own_addresses_.empty()) {
    if (Status prepared = prepare_flushes(); !prepared) return prepared;
  }
  for (auto& rail : rails_) rail->registrations().lend(at, bytes, owner);
  return {};
}

void RailSet::take_back(std::byte* at) {
  for (auto& rail : rails_) rail->registrations().take_back(at);
}

Status RailSet::prepare_flushes() {
  if (!flush_slab_.data()) {
    Result<Slab> slab = Slab::map(kFlushBytes);
    if (!slab) return slab.status();
    flush_slab_ = std::move(slab.value());
  }
  std::vector<fi_addr_t> addresses;
  std::vector<Registration*> registrations;
  for (auto& rail : rails_) {
    Result<fi_addr_t> own = rail->insert(rail->name());
    if (!own) return own.status();
    addresses.push_back(own.value());
    registrations.push_back(nullptr);
    if (!rail->local_registration()) continue;
    MrCache& cache = rail->registrations();
    registrations.back() = cache.take(flush_slab_.data(), kFlushBytes, Access::kRead);
    if (registrations.back() == nullptr) return cache.error();
  }
  flushes_.resize(kFlushes);
  for (FlushSlot& slot : flushes_) {
    slot.operation = Operation::kFlush;
    free_flushes_.push(&slot);
  }
  own_addresses_ = std::move(addresses);
  flush_registrations_ = std::move(registrations);
  return {};
}

// A device may see what a NIC has written later than the processor hears of it. A read of that memory
// through the same NIC comes behind the writes on their way (PCIe's ordering rules); NCCL and
// aws-ofi-nccl flush so, too.
void RailSet::flush(ReceiveRegion& region) {
  for (; region.flushing < rails_.size() && !free_flushes_.empty(); ++region.flushing) {
    size_t rail = region.flushing;
    FlushSlot* slot = free_flushes_.pop();
    slot->region = region.number;
    const Registration* own = flush_registrations_[rail];
    ssize_t rc = rails_[rail]->read(slot, own_addresses_[rail], flush_slab_.data(),
                                    std::min(kFlushBytes, region.bytes),
                                    own != nullptr ? own->descriptor() : nullptr,
                                    remote_address(region), region.registrations[rail]->key);
    if (rc == 0) {
      ++posted_;
      continue;
    }
    free_flushes_.push_front(slot);
    if (rc != -FI_EAGAIN) {
      return lose(region.from, "a device's memory could not be flushed: " +
                                   library_.error_text(static_cast<int>(rc)) + " (" +
                                   rails_[rail]->text() + ")");
    }
    ++counters_.retries;
    break;
  }
  if (region.flushing < rails_.size()) unflushed_.push_back(region.number);
}

ReceiveRegion* RailSet::end_flush(FlushSlot* slot) {
  --posted_;
  free_flushes_.push_front(slot);
  return regions_.find(slot->region);
}

void RailSet::flushed(FlushSlot* slot) {
  ReceiveRegion* region = end_flush(slot);
  if (region == nullptr || ++region->flushed < rails_.size()) return;
  region->observer->on_chunk(region->last);
}

}  // namespace smddp::fabric
