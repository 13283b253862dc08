// Restores the process's signal handlers after a call into a library that installs its own.
#pragma once

#include <signal.h>

namespace smddp {

class KeepSignalHandlers {
 public:
  KeepSignalHandlers() {
    for (int s = 1; s < kSignals; ++s) known_[s] = sigaction(s, nullptr, &before_[s]) == 0;
  }
  ~KeepSignalHandlers() {
    for (int s = 1; s < kSignals; ++s) {
      struct sigaction now;
      if (!known_[s] || sigaction(s, nullptr, &now) != 0) continue;
      // A handler that did not change is not set, so that a change by another thread stays.
      if (now.sa_sigaction != before_[s].sa_sigaction) sigaction(s, &before_[s], nullptr);
    }
  }
  KeepSignalHandlers(const KeepSignalHandlers&) = delete;
  KeepSignalHandlers& operator=(const KeepSignalHandlers&) = delete;

 private:
  static constexpr int kSignals = 32;  // without the real-time signals
  struct sigaction before_[kSignals];
  bool known_[kSignals] = {};
};

}  // namespace smddp
