// Threads that complete futures. A callback may start operations, and wait for them or for other futures: so no
// thread that drives anything runs it, and one that waits holds up no other. Knows no operation.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

#include "common/condition_variable.h"
#include "common/forks.h"

namespace smddp {

class FutureThreads {
 public:
  static FutureThreads& process();  // made anew in a forked child
  // Calls `complete` on a thread that runs nothing else, at once. If none can be started, on this one.
  void run(std::function<void()> complete);
  // The process ends: callbacks under way get a moment, and later ones do not run.
  void settle();
  bool ending() const { return ending_; }  // once settle() has been called

 private:
  FutureThreads() = default;
  void serve();

  std::mutex mutex_;
  std::condition_variable ready_, changed_;
  std::deque<std::function<void()>> queue_;
  size_t free_ = 0;  // threads that run nothing
  size_t running_ = 0;
  bool ended_ = false;
  std::atomic<bool> ending_{false};
  const uint32_t forks_ = fork_count();
};

}  // namespace smddp
