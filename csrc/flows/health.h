// Whether a group works, and if not, why. A fragment that meets an error records it here; the
// FailureDetector tells the peers. Under the engine's lock.
#pragma once

#include <utility>

#include "common/exceptions.h"
#include "common/status.h"

namespace smddp {

class Health {
 public:
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  // For the operations that end with it; throws nothing.
  Status verdict() const noexcept { return copy_of(status_); }
  // Breaks the group. The first reason stays.
  void fail(Status why) {
    if (ok()) status_ = std::move(why);
  }

 private:
  Status status_;
};

}  // namespace smddp
