#include "torch/future_threads.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

namespace smddp {
namespace {

constexpr std::chrono::seconds kIdleThread(1);     // after which a thread ends
constexpr std::chrono::seconds kLastCallbacks(2);  // settle()

}  // namespace

FutureThreads& FutureThreads::process() {
  // Never freed, as threads may use it until the process ends.
  static std::atomic<FutureThreads*> current{nullptr};
  FutureThreads* known = current.load();
  if (known != nullptr && known->forks_ == fork_count()) return *known;
  auto* made = new FutureThreads();
  if (current.compare_exchange_strong(known, made)) return *made;
  delete made;
  return *known;
}

void FutureThreads::run(std::function<void()> complete) {
  std::unique_lock lock(mutex_);
  if (ended_) return;
  try {
    if (free_ == queue_.size()) {
      std::thread(&FutureThreads::serve, this).detach();  // waits for the lock
      ++free_;
    }
    queue_.push_back(complete);
    ready_.notify_one();
  } catch (const std::exception&) {  // no thread, or no memory
    lock.unlock();
    complete();
  }
}

void FutureThreads::serve() {
  std::unique_lock lock(mutex_);
  while (ready_.wait_for(lock, kIdleThread, [this] { return !queue_.empty(); })) {
    std::function<void()> complete = std::move(queue_.front());
    queue_.pop_front();
    --free_;
    ++running_;
    lock.unlock();
    try {
      complete();
    } catch (
        const std::exception&) {  // a callback's, which torch has put into the future that it makes
    }
    complete = nullptr;  // may free tensors: not under the lock
    lock.lock();
    ++free_;
    --running_;
    changed_.notify_all();
  }
  --free_;
}

void FutureThreads::settle() {
  ending_ = true;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kLastCallbacks, [this] { return queue_.empty() && running_ == 0; });
  ended_ = true;
}

}  // namespace smddp
