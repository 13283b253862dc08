// A mutex that knows whether threads wait for it. std::mutex is not fair: a thread that unlocks it and takes it
// again at once keeps the others out, unless it asks here, and yields. Called by Engine.
#pragma once

#include <atomic>
#include <mutex>

namespace smddp {

// Called before a thread takes a CountedMutex, unless it is nullptr: a check that the thread may.
inline std::atomic<void (*)()> check_before_lock{nullptr};

class CountedMutex {
 public:
  using Lock = std::unique_lock<std::mutex>;
  Lock lock() {
    if (auto* check = check_before_lock.load(std::memory_order_relaxed)) check();
    Lock lk(mutex_, std::try_to_lock);
    if (!lk) {
      waiting_.fetch_add(1, std::memory_order_relaxed);
      lk.lock();
      waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    return lk;
  }
  // Threads found it taken, and wait. A hint: it changes at any time.
  bool wanted() const { return waiting_.load(std::memory_order_relaxed) > 0; }

 private:
  std::mutex mutex_;
  std::atomic<int> waiting_{0};
};

}  // namespace smddp
