#include "transport/ofi/regions.h"

#include <cassert>
#include <new>

namespace smddp::ofi {

Regions::Regions(RailSet& rails, PeerTable& peers)
    : rails_(rails),
      peers_(peers),
      flushes_(rails, peers),
      virtual_addresses_((rails[0].info().domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0) {}

bool Regions::open(Peer from, std::byte* memory, size_t bytes, uint32_t* number,
                   wire::Grant* grant) {
  assert(from < peers_.size());
  if (peers_[from].lost || !peers_[from].takes_writes || bytes == 0) return false;
  if (free_.empty()) {
    if (regions_.size() == kMostRegions) return false;
    free_.push_back(static_cast<uint32_t>(regions_.size()));
  }
  if (free_.front() == regions_.size()) regions_.emplace_back();
  Region& region = regions_[free_.front()];
  region = {};
  region.number = free_.front();
  region.from = from;
  region.bytes = bytes;
  region.counted = rails_[0].orders_messages() && peers_[from].address.rails == 1;
  region.lent = rails_[0].registrations().is_lent(memory);
  if (!register_memory(region, memory)) return false;
  free_.pop_front();
  region.open = true;
  ++rails_.counters().regions;
  auto at = reinterpret_cast<uintptr_t>(memory);
  region.address = virtual_addresses_ ? at : at - region.registrations[0]->base();
  grant->address = region.address;
  for (size_t i = 0; i < rails_.size(); ++i) grant->keys[i] = region.registrations[i]->key;
  *number = grant->region = region.number;
  return true;
}

bool Regions::register_memory(Region& region, const std::byte* memory) {
  for (size_t i = 0; i < rails_.size(); ++i) {
    region.registrations[i] =
        rails_[i].registrations().take(memory, region.bytes, Access::kRemoteWrite);
    if (region.registrations[i] != nullptr) continue;
    while (i-- > 0) rails_[i].registrations().give_back(region.registrations[i]);
    return false;
  }
  return true;
}

Region* Regions::find(uint32_t number) {
  return number < regions_.size() && regions_[number].open ? &regions_[number] : nullptr;
}

bool Regions::on_chunk(uint64_t number) {
  Region* region = find(static_cast<uint32_t>(number));
  if (region != nullptr) ++region->arrived;
  return region != nullptr || (number < regions_.size() && regions_[number].abandoned);
}

size_t Regions::arrived(uint32_t number) const {
  const Region& region = regions_[number];
  return region.counted ? region.arrived : SIZE_MAX;
}

bool Regions::visible(uint32_t number) {
  Region* region = find(number);
  if (region == nullptr || !region->lent) return region != nullptr;
  if (!region->asked) {
    region->asked = true;
    flushes_.begin(*region);
  }
  return region->flushed == rails_.size() && !region->flush_failed;
}

void Regions::close(uint32_t number, bool abandoned) {
  Region* region = find(number);
  if (region == nullptr) return;
  region->open = false;
  --rails_.counters().regions;
  flushes_.forget(number);
  region->abandoned = abandoned && divert(*region);
  if (!region->abandoned) release(*region);
}

bool Regions::divert(Region& region) {
  if (virtual_addresses_ || region.lent) return false;
  auto memory = Mapping::map(region.bytes, MAP_PRIVATE | MAP_NORESERVE);
  if (!memory) return false;
  try {
    unread_.push_back(std::move(memory.value()));
  } catch (const std::bad_alloc&) {
    return false;
  }
  for (size_t i = 0; i < rails_.size(); ++i) {
    if (!rails_[i].registrations().divert(region.registrations[i], unread_.back().data(),
                                          region.bytes))
      return false;
  }
  return true;
}

// The registrations and the number come back when no request on the region is with libfabric.
void Regions::release(Region& region) {
  if (region.open || region.flushing > region.flushed) return;
  for (size_t i = 0; i < rails_.size(); ++i)
    rails_[i].registrations().give_back(region.registrations[i]);
  try {
    free_.push_back(region.number);
  } catch (const std::bad_alloc&) {  // the number is never used again
  }
}

void Regions::on_flushed(FlushRead* read) {
  Region& region = regions_[flushes_.finish(read)];
  ++region.flushed;
  release(region);
}

void Regions::on_flush_failed(FlushRead* read, const Status& why) {
  Region& region = regions_[flushes_.finish(read)];
  ++region.flushed;
  if (!region.open) return release(region);
  region.flush_failed = true;
  peers_.lose(region.from,
              {why.code(), "a device's memory could not be flushed: " + why.message()});
}

void Regions::retry() {
  for (size_t n = flushes_.waiting(); n > 0; --n) {
    if (Region* region = find(flushes_.next_waiting())) flushes_.begin(*region);
  }
}

}  // namespace smddp::ofi
