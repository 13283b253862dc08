#include "transport/ofi/tagged_receives.h"

#include <algorithm>
#include <utility>

#include "common/random.h"

namespace smddp::fabric {
namespace {

constexpr uint32_t kFewestExpected = 8;

}  // namespace

TaggedReceives::TaggedReceives(RailSet& rails, PeerTable& peers, ReceiveRegionTable& regions)
    : rails_(rails),
      peers_(peers),
      regions_(regions),
      slots_(rails.transfer() == Transfer::kTagged ? kChunkReceives : 0) {
  for (ChunkReceiveSlot& slot : slots_) {
    slot.kind = SlotKind::kChunkReceive;
    free_.push(&slot);
  }
  if (!slots_.empty()) short_.reserve(wire::kMaxRegions);
}

bool TaggedReceives::has_room(uint32_t chunks) const {
  return free_.size() >= std::min(chunks, kFewestExpected);
}

// A stale or foreign message must not match a region that it was not meant for.
bool TaggedReceives::draw_tag(ReceiveRegion& region) {
  uint64_t random;
  if (!draw_number(&random)) return false;
  region.tag = wire::tag_base(random);
  return true;
}

void TaggedReceives::open(ReceiveRegion& region) {
  region.most_expected = static_cast<uint32_t>(
      std::min({size_t{region.chunks}, kChunkReceivesPerRegion, free_.size()}));
  expect(region);
}

// Chunks of a region are sent in rising order, at most kChunkSendsPerPeer at once. So the posted
// receives always include those of the chunks that come next, and no unexpected message piles up in
// the provider.
void TaggedReceives::expect(ReceiveRegion& region) {
  const size_t rails = std::min(rails_.size(), peers_[region.from].address.rails);
  while (region.next < region.chunks && region.expected < region.most_expected) {
    ChunkReceiveSlot* slot = free_.empty() ? nullptr : free_.pop();
    if (slot == nullptr) break;
    uint32_t index = region.next;
    size_t rail = index % rails;
    Registration* registration = region.registrations[rail];
    ssize_t rc = rails_[rail].receive_tagged(
        slot, region.memory + size_t{index} * region.chunk_bytes, region.size_of(index),
        registration != nullptr ? registration->descriptor() : nullptr,
        wire::tag_of(region.tag, index));
    if (rc != 0) {
      free_.push_front(slot);
      ++rails_.counters().retries;
      break;
    }
    slot->region = region.number;
    slot->index = index;
    slot->posted = true;
    ++region.expected;
    ++region.next;
  }
  if (region.next < region.chunks && region.expected < region.most_expected &&
      !std::exchange(region.waits, true)) {
    short_.push_back(region.number);  // has room for every region
  }
}

TaggedReceives::Chunk TaggedReceives::finish(ChunkReceiveSlot* slot) {
  Chunk chunk{slot->region, slot->index};
  slot->posted = false;
  --regions_.at(chunk.region).expected;
  free_.push_front(slot);
  return chunk;
}

void TaggedReceives::cancel(ReceiveRegion& region) {
  region.next = region.chunks;
  if (region.expected == 0) return;
  for (ChunkReceiveSlot& slot : slots_) {
    if (slot.posted && slot.region == region.number) rails_[slot.rail].cancel(&slot);
  }
}

void TaggedReceives::retry() {
  for (size_t n = short_.size(); n > 0; --n) {
    uint32_t number = short_.front();
    short_.erase(short_.begin());
    regions_.at(number).waits = false;
    expect(regions_.at(number));
  }
}

}  // namespace smddp::fabric
