// The process's endpoint on the network, as the engine uses it: opened by the first group that needs it,
// driven, and given up if it fails. Knows no task and no thread. Called by Engine, under its lock.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "fabric/endpoint.h"
#include "liveness/liveness.h"
#include "progress/groups.h"

namespace smddp {

class Network {
 public:
  // Opens the endpoint on first use, and another one in its place if `unused`, which says that no group
  // works over it, and it has failed or was retired. An error if it has failed.
  Result<fabric::Endpoint*> open(bool unused);
  // A group over the endpoint broke, or a peer was lost: connections may be broken without a word of
  // libfabric, and messages of old groups be on their way. Groups to come are to have a new one.
  void retire() { retired_ = true; }
  // As of the counters of all endpoints so far.
  uint64_t foreign_chunks() const {
    return earlier_foreign_chunks_ + (endpoint_ ? endpoint_->counters().foreign_chunks : 0);
  }
  fabric::Endpoint* endpoint() const { return endpoint_.get(); }  // nullptr if it is not open
  // Keeps `what` until the endpoint is closed: memory that the network may still touch.
  template <class T>
  void keep(std::unique_ptr<T> what) noexcept;
  void close();
  // Opened with the endpoint; nullptr if it could not be.
  liveness::Liveness* liveness() const { return liveness_.get(); }
  void close_liveness() {
    if (liveness_) liveness_->close();
  }

  // As the endpoint's; kUnavailable if it is not open.
  Status reaches(const fabric::MemoryOwner& owner) const;
  Status lend(std::byte* at, size_t bytes, const fabric::MemoryOwner& owner);
  void take_back(std::byte* at) {
    if (endpoint_) endpoint_->take_back(at);
  }

  // The endpoint is open, and has not failed.
  bool works() const { return endpoint_ && status_.ok(); }
  // Some of what was sent is still here.
  bool busy() const { return works() && !endpoint_->idle(); }
  // Gives the groups what has arrived. True if anything moved. If the endpoint fails, tells them once.
  bool progress(Groups& groups) noexcept;

  // To sleep on; -1: nothing.
  int wait_fd() const { return works() ? endpoint_->wait_fd() : -1; }
  // The longest sleep from now on, in milliseconds; -1: no limit.
  int sleep_limit_ms() const;

 private:
  std::vector<std::shared_ptr<void>> kept_;
  std::unique_ptr<fabric::Endpoint> endpoint_;  // destroyed before what is kept
  std::unique_ptr<liveness::Liveness> liveness_;
  Status status_;  // not ok: why the endpoint has failed
  bool retired_ = false;
  uint64_t earlier_foreign_chunks_ = 0;
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
