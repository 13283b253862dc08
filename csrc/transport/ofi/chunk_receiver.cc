// Nothing here allocates, locks or formats text per chunk.
#include "transport/ofi/chunk_receiver.h"

#include <cassert>

#include "transport/ofi/flush_reads.h"
#include "transport/ofi/peer_table.h"
#include "transport/ofi/rail_set.h"
#include "transport/ofi/slots.h"
#include "transport/ofi/tagged_receives.h"

namespace smddp::fabric {

ChunkReceiver::ChunkReceiver(RailSet& rails, PeerTable& peers)
    : rails_(rails),
      peers_(peers),
      tagged_(std::make_unique<TaggedReceives>(rails, peers, regions_)),
      flushes_(std::make_unique<FlushReads>(rails, peers, regions_)),
      virtual_addresses_((rails[0].info().domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0) {}

ChunkReceiver::~ChunkReceiver() = default;

bool ChunkReceiver::open(Peer from, std::byte* memory, size_t bytes, size_t chunk_bytes,
                         ChunkObserver* observer, wire::Grant* grant) {
  assert(from < peers_.size());
  const PeerState& peer = peers_[from];
  if (peer.lost || !peer.takes_chunks || chunk_bytes > rails_.max_chunk()) return false;
  ReceiveRegion* region = regions_.open(from, memory, bytes, chunk_bytes, observer);
  if (region == nullptr) return false;
  region->lent = rails_[0].registrations().is_lent(memory);
  if (!register_memory(*region)) {
    regions_.close(region);
    return false;
  }
  *grant = {};
  grant->region = region->number;
  grant->chunk_bytes = static_cast<uint32_t>(chunk_bytes);
  grant->bytes = bytes;
  if (rails_.transfer() == Transfer::kWrites) {
    auto at = reinterpret_cast<uintptr_t>(memory);
    region->address = virtual_addresses_ ? at : at - region->registrations[0]->base();
    grant->address = region->address;
    for (size_t i = 0; i < rails_.size(); ++i) grant->keys[i] = region->registrations[i]->key;
  } else {
    tagged_->open(*region);
    grant->keys[0] = region->tag;
  }
  return true;
}

bool ChunkReceiver::register_memory(ReceiveRegion& region) {
  bool writes = rails_.transfer() == Transfer::kWrites;
  if (!writes && !(tagged_->has_room(region.chunks) && TaggedReceives::draw_tag(region)))
    return false;
  if (!writes && !rails_[0].local_registration()) return true;
  for (size_t i = 0; i < rails_.size(); ++i) {
    region.registrations[i] = rails_[i].registrations().take(
        region.memory, region.bytes, writes ? Access::kRemoteWrite : Access::kReceive);
    if (region.registrations[i] != nullptr) continue;
    while (i-- > 0) rails_[i].registrations().give_back(region.registrations[i]);
    return false;
  }
  return true;
}

// A tagged receive is cancelled only once its sender sends no more: an unexpected tagged message stops a tcp
// connection, and its sender never gets its buffer back.
void ChunkReceiver::close(uint32_t number, bool over) {
  ReceiveRegion* region = regions_.find(number);
  if (region == nullptr) return;
  bool tagged = rails_.transfer() == Transfer::kTagged;
  region->open = false;
  region->observer = nullptr;
  flushes_->forget(number);
  if (tagged && !over && region->missing > 0) return;
  if (tagged) tagged_->cancel(*region);
  release(*region);
}

bool ChunkReceiver::complete(uint32_t number) {
  ReceiveRegion* region = regions_.find(number);
  return region != nullptr && region->missing == 0;
}

// The registrations and the number come back when no operation on the region is with libfabric.
void ChunkReceiver::release(ReceiveRegion& region) {
  if (region.open || region.expected > 0 || region.flushing > region.flushed) return;
  for (size_t i = 0; i < rails_.size(); ++i) {
    Registration* registration = region.registrations[i];
    if (registration != nullptr) rails_[i].registrations().give_back(registration);
  }
  regions_.close(&region);
}

bool ChunkReceiver::confirm(uint32_t number, uint64_t chunks) {
  ReceiveRegion* region = regions_.find(number);
  if (region == nullptr || chunks > region->chunks) return false;
  while (region->chunks - region->missing < chunks)
    arrived(number, region->chunks - region->missing);
  return true;
}

void ChunkReceiver::on_received(ChunkReceiveSlot* slot, size_t bytes) {
  TaggedReceives::Chunk chunk = tagged_->finish(slot);
  ReceiveRegion& region = regions_.at(chunk.region);
  tagged_->expect(region);
  if (!region.open) return release(region);
  if (bytes == region.size_of(chunk.index)) return arrived(chunk.region, chunk.index);
  ++rails_.counters().foreign_chunks;
}

void ChunkReceiver::arrived(uint32_t number, uint32_t index) {
  ReceiveRegion* region = regions_.find(number);
  if (region == nullptr || !ReceiveRegionTable::arrive(*region, index)) {
    ++rails_.counters().foreign_chunks;
    return;
  }
  ++rails_.counters().chunks_received;
  if (region->lent && region->missing == 0) {
    region->last = index;
    return flushes_->begin(*region);
  }
  region->observer->on_chunk(index);
}

bool ChunkReceiver::on_receive_failed(ChunkReceiveSlot* slot) {
  ReceiveRegion& region = regions_.at(tagged_->finish(slot).region);
  if (region.open) return true;
  release(region);
  return false;
}

void ChunkReceiver::on_flushed(FlushSlot* slot) {
  ReceiveRegion& region = flushes_->finish(slot);
  if (!region.open) return release(region);
  if (region.flushed == rails_.size() && !region.flush_failed)
    region.observer->on_chunk(region.last);
}

void ChunkReceiver::on_flush_failed(FlushSlot* slot, const Status& why) {
  ReceiveRegion& region = flushes_->finish(slot);
  if (!region.open) return release(region);
  region.flush_failed = true;
  peers_.lose(region.from,
              {why.code(), "a device's memory could not be flushed: " + why.message()});
}

Status ChunkReceiver::prepare_flushes() { return flushes_->prepare(); }

bool ChunkReceiver::waits() const { return tagged_->waits() || flushes_->waits(); }

void ChunkReceiver::retry() {
  tagged_->retry();
  flushes_->retry();
}

bool ChunkReceiver::idle() const { return flushes_->idle(); }

}  // namespace smddp::fabric
