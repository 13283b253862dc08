#include "progress/network.h"

#include <sched.h>

#include "common/clock.h"
#include "common/exceptions.h"
#include "common/log.h"
#include "liveness/contact.h"
#include "transport/ofi/open.h"

namespace smddp {
namespace {

// What broken groups have sent last gets so long to go out.
constexpr uint64_t kLastWordsNs = 100'000'000;

}  // namespace

Result<transport::Transport*> Network::open() {
  if (!status_.ok()) return status_;
  if (!transport_) {
    if (Status s = (open_ ? open_() : ofi::open()).into(transport_); !s) return s;
    if (!liveness_ && !open_) liveness_ = liveness::open_if_possible(transport_->facts().ip);
  }
  return transport_.get();
}

std::string Network::ip() const {
  if (transport_ && !transport_->facts().ip.empty()) return transport_->facts().ip;
  if (!liveness_) return {};
  auto contact = liveness::unpack(liveness_->contact());
  return contact ? contact.value().address().ip_text() : std::string();
}

bool Network::close_if_worn(Groups& groups, std::vector<std::shared_ptr<void>>* freed) {
  if (!transport_ || !lent_.empty() || groups.needs_network()) return false;
  if (!worn_ && status_.ok() && !transport_->has_lost_peers()) return false;
  drain(groups, kLastWordsNs);
  groups.on_network_closed();
  foreign_before_ += transport_->counters().foreign_writes;
  keeps_for_good_ |= !transport_->close();
  transport_.reset();
  if (!keeps_for_good_) freed->swap(kept_);
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

Status Network::reaches(const transport::MemoryOwner& owner) const {
  if (!works()) return {Code::kUnavailable, "no network is open"};
  return transport_->reaches(owner);
}

Status Network::lend(std::byte* at, size_t bytes, const transport::MemoryOwner& owner) {
  if (!works()) return {Code::kUnavailable, "no network is open"};
  auto entry = lent_.insert(at).first;
  Status lent = transport_->lend(at, bytes, owner);
  if (!lent) lent_.erase(entry);
  return lent;
}

void Network::take_back(std::byte* at) {
  if (transport_) transport_->take_back(at);
  lent_.erase(at);
}

bool Network::progress(Groups& groups) noexcept {
  if (!works()) return false;
  try {
    auto events = transport_->poll(groups);
    if (events) return events.value() > 0;
    status_ = events.status();
    groups.on_fabric_failed(status_);
    log(LogLevel::kError, "the network failed: " + status_.message());
  } catch (...) {
    groups.fail_busy(status_of_exception());
  }
  return true;
}

Result<std::string> describe_network() {
  auto transport = ofi::open();
  if (!transport) return transport.status();
  return transport.value()->facts().description;
}

void set_packaged_libfabric(const std::string& path) { ofi::set_packaged_library(path); }

}  // namespace smddp
