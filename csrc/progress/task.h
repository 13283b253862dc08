// Something that is waited for: one collective of one group.
#pragma once

#include <atomic>
#include <memory>

#include "common/status.h"

namespace smddp {

class Task {
 public:
  virtual ~Task() = default;
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Valid once done().
  const Status& status() const { return status_; }

 protected:
  // Runs once, on the thread that drives the engine, without the engine's lock: it may wait for
  // other tasks. Whoever sees done() also sees what it wrote.
  virtual void on_done() {}

 private:
  friend class Engine;
  Status status_;
  std::atomic<bool> done_{false};
};

}  // namespace smddp
