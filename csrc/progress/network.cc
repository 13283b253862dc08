#include "progress/network.h"

#include <new>

#include "common/exceptions.h"
#include "common/log.h"

namespace smddp {

Result<fabric::Endpoint*> Network::open(bool unused) {
  if (unused && (retired_ || !status_.ok())) {
    close();
    status_ = {};
  }
  if (!status_.ok()) return status_;
  if (!endpoint_) {
    auto endpoint = fabric::Endpoint::open(fabric::options_from_env());
    if (!endpoint) return endpoint.status();
    endpoint_ = std::move(endpoint.value());
    retired_ = false;
    if (!liveness_) liveness_ = liveness::open_if_possible(endpoint_->ip());
  }
  return endpoint_.get();
}

void Network::close() {
  if (!endpoint_) return;
  earlier_foreign_chunks_ = foreign_chunks();
  // What libfabric may still use is never freed.
  if (!endpoint_->close()) (void)new (std::nothrow) auto(std::move(kept_));
  kept_.clear();
  endpoint_.reset();
}

Status Network::reaches(const fabric::MemoryOwner& owner) const {
  if (!works()) return {Code::kUnavailable, "no fabric is open"};
  return endpoint_->reaches(owner);
}

Status Network::lend(std::byte* at, size_t bytes, const fabric::MemoryOwner& owner) {
  if (!works()) return {Code::kUnavailable, "no fabric is open"};
  return endpoint_->lend(at, bytes, owner);
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
