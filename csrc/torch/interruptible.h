// Waiting in turns that are short enough for Ctrl-C. For waits of the torch module; it knows nothing of
// what is waited for.
#pragma once

#include <algorithm>
#include <chrono>

#include "torch/runtime.h"

namespace smddp {

// Calls attempt(turn) until it returns true, or until `timeout` is over (zero: no limit). An attempt
// waits for at most `turn`, a duration in nanoseconds. Python's signal handlers run between attempts;
// they may throw. Returns whether an attempt returned true.
template <class Attempt>
bool wait_interruptibly(std::chrono::milliseconds timeout, Attempt&& attempt) {
  constexpr std::chrono::nanoseconds kForever = std::chrono::hours(24 * 365);
  // How long a wait may keep a signal from Python.
  constexpr std::chrono::nanoseconds kTurn = std::chrono::milliseconds(200);
  std::chrono::nanoseconds left =
      timeout.count() > 0 ? std::chrono::nanoseconds(timeout) : kForever;
  while (left.count() > 0) {
    std::chrono::nanoseconds turn = std::min(left, kTurn);
    if (attempt(turn)) return true;
    left -= turn;
    check_interrupt();
  }
  return false;
}

}  // namespace smddp
