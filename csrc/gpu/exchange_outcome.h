// How an exchange between hosts ended, as the threads that carry it and the group that waits for it see it.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "common/exceptions.h"
#include "common/status.h"

namespace smddp {

// The first failure of an exchange. It is known before any stream goes on.
class ExchangeOutcome {
 public:
  // Is told a reason; must neither block nor call the device.
  using Told = std::function<void(const std::string&)>;

  Status get() const {
    std::lock_guard lock(mutex_);
    return copy_of(status_);
  }
  void fail(const Status& why) {
    std::lock_guard lock(mutex_);
    if (!status_) return;
    status_ = copy_of(why);
    if (told_) told_(status_.message());
  }
  void tell(Told whom) {
    std::lock_guard lock(mutex_);
    told_ = std::move(whom);
  }

  std::atomic<int> under_way{0};  // collectives of the CPU

 private:
  mutable std::mutex mutex_;
  Status status_;
  Told told_;
};

}  // namespace smddp
