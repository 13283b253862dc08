#include "transport/ofi/flush_reads.h"

#include <algorithm>

#include "transport/ofi/regions.h"

namespace smddp::ofi {
namespace {

constexpr size_t kFlushBytes = 8;

}  // namespace

Status FlushReads::prepare() {
  if (!own_addresses_.empty()) return {};
  if (!target_.data()) {
    if (Status s = Mapping::map(kFlushBytes, MAP_PRIVATE).into(target_); !s) return s;
  }
  std::vector<fi_addr_t> addresses;
  std::vector<Registration*> registrations;
  for (size_t i = 0; i < rails_.size(); ++i) {
    Rail& rail = rails_[i];
    Result<fi_addr_t> own = rail.insert(rail.name());
    if (!own) return own.status();
    addresses.push_back(own.value());
    registrations.push_back(nullptr);
    if (!rail.local_registration()) continue;
    Registrations& cache = rail.registrations();
    registrations.back() = cache.take(target_.data(), kFlushBytes, Access::kRead);
    if (registrations.back() == nullptr) return cache.error();
  }
  reads_.resize(kFlushReads);
  for (FlushRead& read : reads_) {
    read.kind = Request::Kind::kFlush;
    free_.push(&read);
  }
  unflushed_.reserve(kMostRegions);
  own_addresses_ = std::move(addresses);
  registrations_ = std::move(registrations);
  return {};
}

void FlushReads::begin(Region& region) {
  for (; region.flushing < rails_.size() && !free_.empty(); ++region.flushing) {
    size_t rail = region.flushing;
    FlushRead* read = free_.pop();
    read->region = region.number;
    const Registration* own = registrations_[rail];
    ssize_t rc = rails_[rail].read(read, own_addresses_[rail], target_.data(),
                                   std::min(kFlushBytes, region.bytes),
                                   own != nullptr ? own->descriptor() : nullptr, region.address,
                                   region.registrations[rail]->key);
    if (rc == 0) continue;
    free_.push_front(read);
    if (rc != -FI_EAGAIN) {
      return peers_.lose(
          region.from, rails_.refusal("a device's memory could not be flushed", rc, rails_[rail]));
    }
    ++rails_.counters().retries;
    break;
  }
  if (region.flushing < rails_.size()) unflushed_.push_back(region.number);
}

uint32_t FlushReads::finish(FlushRead* read) {
  free_.push_front(read);
  return read->region;
}

uint32_t FlushReads::next_waiting() {
  uint32_t number = unflushed_.front();
  unflushed_.erase(unflushed_.begin());
  return number;
}

}  // namespace smddp::ofi
