// Something that a thread can wait for: one collective of one group. Knows nothing of what it does.
// Made by groups, finished by the engine.
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
  // other tasks. A thread that sees done() also sees what on_done() wrote.
  virtual void on_done() {}

 private:
  friend class Engine;
  Status status_;
  std::atomic<bool> done_{false};
};

}  // namespace smddp
