#include "torch/error_state.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>

#include "torch/interruptible.h"

namespace smddp {
namespace {

// Of the one handler; async-signal-safe.
std::atomic<int> signal_notification{-1};
std::atomic<int> signal_seen{0};

void notify(int descriptor) {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = ::write(descriptor, &one, sizeof one);
}

void on_signal(int number) {
  int saved = errno;
  signal_seen = number;
  notify(signal_notification);
  errno = saved;
}

}  // namespace

ErrorState& ErrorState::process() {
  static auto* state = new ErrorState();  // never freed, as threads may wait until the process ends
  return *state;
}

ErrorState::ErrorState() : notification_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void ErrorState::set_reporter(std::chrono::milliseconds hold) {
  std::lock_guard lock(mutex_);
  hold_ = hold;
  failure_.clear();              // the next job may fail as this one did
  reported_ = taken_ = raised_;  // and what ended it is no matter of this reporter
  changed_.notify_all();
}

void ErrorState::ask(const std::string& why) {
  std::lock_guard lock(mutex_);
  if (raised_ > taken_) return;  // the reporter has not begun yet: one report says both
  why_ = why;
  ++raised_;
  notify(notification_);
}

void ErrorState::tell(const Status& why) noexcept {
  const std::string& text = why.message();
  // By itself, or as the cause of another rank's end.
  if (text.find(kAbortedByCaller) != text.npos || text.starts_with(kDestroyedByCaller)) return;
  try {
    {
      std::lock_guard lock(mutex_);
      if (text == failure_) return;
      failure_ = text;
    }
    ask(text);
  } catch (const std::exception&) {  // without memory there is no report
  }
}

bool ErrorState::watch_signal(int number) {
  struct sigaction old{};
  if (::sigaction(number, nullptr, &old) != 0) return false;
  if (old.sa_handler == on_signal) return true;
  if (old.sa_handler != SIG_DFL) return false;
  signal_notification = notification_;
  struct sigaction own{};
  own.sa_handler = on_signal;
  own.sa_flags = SA_RESTART;
  return ::sigaction(number, &own, nullptr) == 0;
}

std::string ErrorState::take() {
  uint64_t count;
  while (::read(notification_, &count, sizeof count) > 0) {
  }
  if (int number = signal_seen.exchange(0)) ask("signal " + std::to_string(number));
  std::lock_guard lock(mutex_);
  if (raised_ == taken_) return "";
  taken_ = raised_;
  return why_;
}

void ErrorState::reported() {
  std::lock_guard lock(mutex_);
  reported_ = taken_;
  changed_.notify_all();
}

void ErrorState::hold(bool interruptible) {
  std::chrono::milliseconds limit;
  uint64_t raised;
  {
    std::lock_guard lock(mutex_);
    limit = hold_;
    raised = raised_;
    if (limit.count() == 0 || reported_ >= raised) return;
  }
  auto held = [&](std::chrono::nanoseconds turn) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, turn, [&] { return reported_ >= raised || hold_.count() == 0; });
  };
  interruptible ? wait_interruptibly(limit, held) : held(limit);
}

}  // namespace smddp
