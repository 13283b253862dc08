// The process's transport, as the engine uses it: opened by the first group that needs it, driven, and given up
// if it fails. Knows no task and no thread. Called by Engine, under its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "liveness/liveness.h"
#include "progress/groups.h"

namespace smddp {

class Network {
 public:
  // `open` opens another transport than libfabric's, to ranks of this process: none of them is asked whether its
  // process lives.
  explicit Network(transport::Open open = nullptr) : open_(std::move(open)) {}
  // Opens the transport on first use. An error if it has failed.
  Result<transport::Transport*> open();
  // As of the transport's counters, over all transports of this process.
  uint64_t foreign_writes() const {
    return foreign_before_ + (transport_ ? transport_->counters().foreign_writes : 0);
  }
  transport::Transport* transport() const { return transport_.get(); }  // nullptr if it is not open
  // Keeps `what` until the transport is closed: memory that the network may still touch.
  template <class T>
  void keep(std::unique_ptr<T> what) noexcept;
  void close() { transport_.reset(); }
  // What the latest group between hosts has found the network to be, and how, for later groups; "": nothing yet.
  struct Known {
    std::string model, source;
    bool doubted = false;  // its transfers have other rates: a later group measures again
  };
  void remember(Known known) { known_ = std::move(known); }
  const Known& known() const { return known_; }
  // Large transfers contradict what is known. True if it has to be measured again; not more than twice, as then it is not
  // the model that is wrong.
  bool doubt() {
    if (doubts_ == 2 || known_.doubted) return false;
    ++doubts_;
    return known_.doubted = true;
  }

  // A group over the transport broke, or ended: its connections are broken, or may break unnoticed while no
  // group uses them. Later groups get a new transport as soon as no group needs this one.
  void wear() { worn_ = true; }
  // Closes a transport of which some connections may be broken, if no group needs it and no memory is lent to
  // it: true. open() opens a new one.
  //
  // Why not the old one: a provider connects by address, and gives no say in which connection it takes.
  // tcp;ofi_rxm 1.17 finds the broken one again if the same address is inserted again, and tcp may end a good one
  // (docs/dev/providers.md, "Connections that cross"). The address of a new
  // transport goes through the store with the new group, so nothing that an older group has sent arrives
  // there.
  //
  // `*freed` gets what was kept for it, to be destroyed without the engine's lock: it may hold tensors, whose
  // end takes the interpreter's lock.
  bool close_if_worn(Groups& groups, std::vector<std::shared_ptr<void>>* freed);
  // Opened with the transport; nullptr if it could not be.
  liveness::Liveness* liveness() const { return liveness_.get(); }
  // At which other hosts reach this one; "" without either.
  std::string ip() const;
  void close_liveness() {
    if (liveness_) liveness_->close();
  }

  // As the transport's; kUnavailable if it is not open.
  Status reaches(const transport::MemoryOwner& owner) const;
  Status lend(std::byte* at, size_t bytes, const transport::MemoryOwner& owner);
  void take_back(std::byte* at);

  // The transport is open, and has not failed.
  bool works() const { return transport_ && status_.ok(); }
  // Some of what was sent is still here.
  bool busy() const { return works() && !transport_->idle(); }
  // Gives the groups what has arrived. True if anything moved. If the transport fails, tells them once.
  bool progress(Groups& groups) noexcept;
  // Drives the groups and the transport until nothing is under way, but not longer than `ns`.
  void drain(Groups& groups, uint64_t ns) noexcept;

  // To sleep on; -1: nothing.
  int wait_fd() const { return works() ? transport_->wait_fd() : -1; }
  // Whether what happens on it ends a sleep on wait_fd().
  bool wakes() const { return !works() || wait_fd() >= 0; }
  // The longest sleep from now on where it wakes, in milliseconds; -1: no limit.
  int sleep_limit_ms() const { return works() ? transport_->sleep_limit_ms() : -1; }

 private:
  const transport::Open open_;  // none: libfabric's
  std::vector<std::shared_ptr<void>> kept_;
  std::unique_ptr<transport::Transport> transport_;  // destroyed before what is kept
  std::unique_ptr<liveness::Liveness> liveness_;
  Status status_;  // not ok: why the transport has failed
  bool worn_ = false;
  bool keeps_for_good_ = false;  // the network may use what is kept for the rest of the process
  uint64_t foreign_before_ = 0;
  std::set<const std::byte*> lent_;
  Known known_;
  int doubts_ = 0;
};

// What the environment makes of the process's transport: opens one, and closes it again.
Result<std::string> describe_network();
// Names a libfabric that a Python package brought; empty: there is none. Before the first transport is opened.
void set_packaged_libfabric(const std::string& path);

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
