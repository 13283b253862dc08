#include "progress/network.h"

#include <sched.h>

#include "common/clock.h"
#include "common/exceptions.h"
#include "common/log.h"

namespace smddp {
namespace {

constexpr uint64_t kLastWordsNs = 100'000'000;

}  // namespace

Result<fabric::Endpoint*> Network::open() {
  if (!status_.ok()) return status_;
  if (!endpoint_) {
    auto endpoint = fabric::Endpoint::open(fabric::options_from_env());
    if (!endpoint) return endpoint.status();
    endpoint_ = std::move(endpoint.value());
    if (!liveness_) liveness_ = liveness::open_if_possible(endpoint_->ip());
  }
  return endpoint_.get();
}

void Network::close_worn(Groups& groups) {
  // What the broken groups have sent last gets a moment to go out.
  for (uint64_t until = now_ns() + kLastWordsNs; busy() && now_ns() < until;) {
    if (!progress(groups)) sched_yield();
  }
  groups.on_network_closed();
  foreign_before_ += endpoint_->counters().foreign_chunks;
  // Else libfabric may still use what is kept, for the rest of the process.
  if (fabric::Endpoint::close(std::move(endpoint_))) kept_.clear();
  status_ = Status();
  worn_ = false;
}

Status Network::reaches(const fabric::MemoryOwner& owner) const {
  if (!works()) return {Code::kUnavailable, "no fabric is open"};
  return endpoint_->reaches(owner);
}

Status Network::lend(std::byte* at, size_t bytes, const fabric::MemoryOwner& owner) {
  if (!works()) return {Code::kUnavailable, "no fabric is open"};
  auto entry = lent_.insert(at).first;
  Status lent = endpoint_->lend(at, bytes, owner);
  if (!lent) lent_.erase(entry);
  return lent;
}

void Network::take_back(std::byte* at) {
  if (endpoint_) endpoint_->take_back(at);
  lent_.erase(at);
}

bool Network::progress(Groups& groups) noexcept {
  if (!works()) return false;
  try {
    auto events = endpoint_->progress(groups);
    if (events) return events.value() > 0;
    status_ = events.status();
    groups.on_fabric_failed(status_);
    log(LogLevel::kError, "the network failed: " + status_.message());
  } catch (...) {
    groups.fail_busy(status_of_exception());
  }
  return true;
}

int Network::sleep_limit_ms() const {
  if (!works()) return -1;
  return wait_fd() >= 0 && endpoint_->may_sleep() ? endpoint_->sleep_limit_ms() : 1;
}

}  // namespace smddp
