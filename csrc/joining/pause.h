// The pauses between looks at a store: each twice as long as the one before, so that what comes soon is
// seen soon and many ranks that wait for long leave the store and the cores alone. For waits at start-up.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace smddp {

class Pause {
 public:
  explicit Pause(std::chrono::milliseconds longest) : longest_(longest) {}
  void sleep() {
    std::this_thread::sleep_for(next_);
    next_ = std::min(2 * next_, longest_);
  }

 private:
  const std::chrono::milliseconds longest_;
  std::chrono::milliseconds next_{1};
};

}  // namespace smddp
