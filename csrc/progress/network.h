// The process's endpoint on the network, as the engine uses it: opened by the first group that needs it,
// driven, and given up if it fails. Knows no task and no thread. Called by Engine, under its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "liveness/liveness.h"
#include "progress/groups.h"
#include "transport/ofi/endpoint.h"

namespace smddp {

class Network {
 public:
  // Instead of what the environment says, before the first open(). No other process is asked whether it lives.
  void simulate(const fabric::Options& options) { simulated_ = options; }
  // Opens the endpoint on first use. An error if it has failed.
  Result<fabric::Endpoint*> open();
  // As of the endpoint's counters, over all endpoints of this process.
  uint64_t foreign_chunks() const {
    return foreign_before_ + (endpoint_ ? endpoint_->counters().foreign_chunks : 0);
  }
  fabric::Endpoint* endpoint() const { return endpoint_.get(); }  // nullptr if it is not open
  // Keeps `what` until the endpoint is closed: memory that the network may still touch.
  template <class T>
  void keep(std::unique_ptr<T> what) noexcept;
  void close() { endpoint_.reset(); }
  // What the latest group between hosts has found the network to be, and how, for later groups; "": nothing yet.
  struct Known {
    std::string model, source;
  };
  void remember(Known known) { known_ = std::move(known); }
  const Known& known() const { return known_; }

  // A group over the endpoint broke, or ended: its connections are broken, or may break unnoticed while no
  // group uses them. Later groups get a new endpoint as soon as no group needs this one.
  void wear() { worn_ = true; }
  // Closes an endpoint of which some connections may be broken, if no group needs it and no memory is lent to
  // it: true. open() opens a new one.
  //
  // Why not the old one: a provider connects by address, and gives no say in which connection it takes.
  // tcp;ofi_rxm 1.17 finds the broken one again if the same address is inserted again. The address of a new
  // endpoint goes through the store with the new group, so nothing that an older group has sent arrives
  // there.
  bool close_if_worn(Groups& groups);
  // Opened with the endpoint; nullptr if it could not be.
  liveness::Liveness* liveness() const { return liveness_.get(); }
  void close_liveness() {
    if (liveness_) liveness_->close();
  }

  // As the endpoint's; kUnavailable if it is not open.
  Status reaches(const fabric::MemoryOwner& owner) const;
  Status lend(std::byte* at, size_t bytes, const fabric::MemoryOwner& owner);
  void take_back(std::byte* at);

  // The endpoint is open, and has not failed.
  bool works() const { return endpoint_ && status_.ok(); }
  // Some of what was sent is still here.
  bool busy() const { return works() && !endpoint_->idle(); }
  // Gives the groups what has arrived. True if anything moved. If the endpoint fails, tells them once.
  bool progress(Groups& groups) noexcept;
  // Drives the groups and the endpoint until nothing is under way, but not longer than `ns`.
  void drain(Groups& groups, uint64_t ns) noexcept;

  // To sleep on; -1: nothing.
  int wait_fd() const { return works() ? endpoint_->wait_fd() : -1; }
  // Whether what happens on it ends a sleep on wait_fd().
  bool wakes() const { return !works() || wait_fd() >= 0; }
  // The longest sleep from now on where it wakes, in milliseconds; -1: no limit.
  int sleep_limit_ms() const;

 private:
  std::vector<std::shared_ptr<void>> kept_;
  std::unique_ptr<fabric::Endpoint> endpoint_;  // destroyed before what is kept
  std::unique_ptr<liveness::Liveness> liveness_;
  std::optional<fabric::Options> simulated_;
  Status status_;  // not ok: why the endpoint has failed
  bool worn_ = false;
  bool keeps_for_good_ = false;  // libfabric may use what is kept for the rest of the process
  uint64_t foreign_before_ = 0;
  std::set<const std::byte*> lent_;
  Known known_;
};

template <class T>
void Network::keep(std::unique_ptr<T> what) noexcept {
  try {
    kept_.emplace_back();
    kept_.back() = std::shared_ptr<T>(std::move(what));
  } catch (...) {
    (void)what.release();  // never freed, rather than freed too early
  }
}

}  // namespace smddp
