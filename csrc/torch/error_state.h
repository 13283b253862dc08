// The error state of this process, for reports: an operation has failed, or a signal or a rank asks for a report. One
// thread of Python waits for a notification, tells the other ranks and writes the report. Meanwhile the errors are
// held back, as they may end the process. Any thread may call any function.
#pragma once

#include <chrono>
#include <mutex>
#include <string>

#include "common/condition_variable.h"
#include "common/status.h"

namespace smddp {

// How the errors of operations begin that a program ended itself: not reported.
inline constexpr const char* kAbortedByCaller = "the group was aborted by ";
inline constexpr const char* kDestroyedByCaller = "the group was destroyed";

class ErrorState {
 public:
  static ErrorState& process();

  // From now on errors are held back for `hold` at most; zero: there is no reporter. Those so far are not reported.
  void set_reporter(std::chrono::milliseconds hold);
  // An operation has failed. The same reason again changes nothing: all operations of a broken group have it. Nor does
  // what a caller asked for.
  void tell(const Status& why) noexcept;
  // Another rank, or the program, asks for a report.
  void ask(const std::string& why);
  // Asks for a report at each signal `number`; false if the program handles it already.
  bool watch_signal(int number);

  // A file descriptor that is readable once a report is wanted.
  int notification() const { return notification_; }
  // Why a report is wanted since the last call; "": it is not.
  std::string take();
  // The report of what take() returned is made.
  void reported();
  // Waits until reported(), if a report is wanted. Ctrl-C ends it if it is `interruptible`, which takes the GIL.
  void hold(bool interruptible = true);

 private:
  ErrorState();

  int notification_ = -1;  // an eventfd, which the signal handler may write
  std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::milliseconds hold_{0};
  std::string why_;      // of the latest one
  std::string failure_;  // the latest that was told
  uint64_t raised_ = 0, taken_ = 0, reported_ = 0;
};

}  // namespace smddp
