// What goes wrong in this process and is worth a report: an operation that has failed, or a signal that asks
// for one. One thread of Python waits for it, tells the other ranks and writes the report. Meanwhile the
// errors are held back, as they may end the process. Any thread may call any function.
#pragma once

#include <chrono>
#include <mutex>
#include <string>

#include "common/condition_variable.h"
#include "common/status.h"

namespace smddp {

// How the errors of operations begin that a program ended itself: no trouble.
inline constexpr const char* kAbortedByCaller = "the group was aborted by ";
inline constexpr const char* kDestroyedByCaller = "the group was destroyed";

class Trouble {
 public:
  static Trouble& process();

  // From now on errors are held back for `hold` at most; zero: there is no reporter.
  void set_reporter(std::chrono::milliseconds hold);
  // An operation has failed. The same reason again is no new trouble: all operations of a broken group have
  // it. Nor is what a caller asked for.
  void tell(const Status& why) noexcept;
  // Someone asks for a report.
  void ask(const std::string& why);
  // Asks for a report at each signal `number`; false if the program handles it already.
  bool watch_signal(int number);

  // A file descriptor that is readable once there is trouble.
  int bell() const { return bell_; }
  // The trouble that came since the last call; "": none.
  std::string take();
  // The report of what take() returned is made.
  void reported();
  // Waits until reported(), if there is trouble. Ctrl-C ends it.
  void hold();

 private:
  Trouble();
  void raise(const std::string& why);

  int bell_ = -1;  // an eventfd, which the signal handler may write
  std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::milliseconds hold_{0};
  std::string why_;      // of the latest trouble
  std::string failure_;  // the latest that was told
  uint64_t raised_ = 0, taken_ = 0, reported_ = 0;
};

}  // namespace smddp
