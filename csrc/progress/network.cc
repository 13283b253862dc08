#include "progress/network.h"

#include <sched.h>

#include "common/clock.h"
#include "common/exceptions.h"
#include "common/log.h"

namespace smddp {
namespace {

// What broken groups have sent last gets so long to go out.
constexpr uint64_t kLastWordsNs = 100'000'000;

}  // namespace

Result<fabric::Endpoint*> Network::open() {
  if (!status_.ok()) return status_;
  if (!endpoint_) {
    auto endpoint = fabric::Endpoint::open(simulated_ ? *simulated_ : fabric::options_from_env());
    if (!endpoint) return endpoint.status();
    endpoint_ = std::move(endpoint.value());
    if (!liveness_ && !simulated_) liveness_ = liveness::open_if_possible(endpoint_->ip());
  }
  return endpoint_.get();
}

bool Network::close_if_worn(Groups& groups) {
  if (!endpoint_ || !lent_.empty() || groups.needs_network()) return false;
  if (!worn_ && status_.ok() && !endpoint_->has_lost_peers()) return false;
  drain(groups, kLastWordsNs);
  groups.on_network_closed();
  foreign_before_ += endpoint_->counters().foreign_chunks;
  keeps_for_good_ |= !fabric::Endpoint::close(std::move(endpoint_));
  if (!keeps_for_good_) kept_.clear();
  status_ = Status();
  worn_ = false;
  return true;
}

void Network::drain(Groups& groups, uint64_t ns) noexcept {
  uint64_t until = now_ns() + ns;
  while (works() && (busy() || groups.busy()) && now_ns() < until) {
    bool moved = groups.progress();
    if (!progress(groups) && !moved) sched_yield();
  }
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
  return endpoint_->may_sleep() ? endpoint_->sleep_limit_ms() : 1;
}

}  // namespace smddp
