#include "progress/engine.h"

#include <sched.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "common/clock.h"
#include "common/exceptions.h"
#include "common/processor.h"
#include "progress/own_core.h"

namespace smddp {
namespace {

// An event ends a sleep at once; this only bounds the delay if a provider does not signal its file
// descriptor.
constexpr uint64_t kLongestSleepNs = 100'000'000;
// How long the end of the process waits for operations that no caller has waited for, for groups to leave, and then for
// messages under way.
constexpr uint64_t kInFlightNs = 1'000'000'000, kLeaveNs = 5'000'000'000, kFlushNs = 1'000'000'000;
constexpr std::chrono::microseconds kInFlightLook(100);
// Between two looks at a network from which no thread awaits anything.
constexpr std::chrono::milliseconds kIdleLook(50);
// For so long the background thread leaves a message to its caller, as most callers wait for it at once. 1 KiB inside a
// host takes 15.6 us from torch, and 35 where each message wakes that thread (2026-11-28, Intel Xeon). Not measured: other
// times.
constexpr std::chrono::microseconds kMoment(200);
// So many times it looks again after a message, so that the next message need not wake it. 5 and 1,000 take as long
// (2026-11-29-constants, AMD EPYC).
constexpr int kMoments = 50;
// While something moves, groups check for late or dead ranks once in this many passes: a look at the clock takes
// 50 ns, a call of 1 KiB inside a host 600 (2026-11-22, AMD EPYC). With 128 it takes as long (2026-11-29-constants).
constexpr uint32_t kPassesPerWatch = 1024;
// A driver that yields to a thread that waits for the lock yields at most so often. 1,000 times: no difference but noise
// (2026-11-29-constants, AMD EPYC).
constexpr int kYieldsToContenders = 64;

}  // namespace

Engine::Engine(intranode::Presence& presence, intranode::Neighbors& neighbors, Network& network)
    : presence_(presence), neighbors_(neighbors), network_(network) {}

Status Engine::start() {
  wait_policy_ = WaitPolicy::from_env();
  try {
    thread_ = std::thread([this] { background(); });
  } catch (const std::system_error& error) {
    stop_ = true;
    return {Code::kUnavailable,
            std::string("could not start the engine's thread: ") + error.what()};
  }
  return {};
}

Engine::~Engine() { shutdown(); }

void Engine::shutdown() {
  if (forked()) {  // the thread is the parent's
    if (thread_.joinable()) thread_.detach();
    return;
  }
  Lock lk = lock();
  if (stop_) return;
  for (uint64_t until = now_ns() + kInFlightNs; groups_.busy() && now_ns() < until; lk = lock()) {
    kick(std::move(lk));
    std::this_thread::sleep_for(kInFlightLook);
  }
  stop_ = true;
  background_cv_.notify_all();
  waiters_cv_.notify_all();
  presence_.notify_self();
  lk.unlock();
  if (thread_.joinable()) thread_.join();
  lk.lock();
  groups_.leave();
  for (uint64_t until = now_ns() + kLeaveNs;
       groups_.busy() && network_.works() && now_ns() < until;) {
    if (!pass()) sched_yield();
  }
  network_.drain(groups_, kFlushNs);
  groups_.detach_all();
  lk.unlock();
  // Before the connections, so that the peers find that this process has ended.
  network_.close_liveness();
  lk.lock();
  network_.close();
}

void Engine::count_making(int groups) {
  std::vector<std::shared_ptr<void>> freed;  // destroyed after the lock
  Lock lk = lock();
  groups_.count_making(groups);
  bool closed = groups > 0 && network_.close_if_worn(groups_, &freed);
  if (closed && sleeping_) presence_.notify_self();  // the driver sleeps on the old endpoint
}

void Engine::attach(const JobKey& key, Progressable* group) {
  Lock lk = lock();
  groups_.attach(key, group);
}

void Engine::detach(const JobKey& key) {
  Lock lk = lock();
  groups_.detach(key);
  run_complete(lk);
}

void Engine::expect_local_ranks(int ranks) {
  Lock lk = lock();
  wait_policy_.expect_local_ranks(ranks, std::thread::hardware_concurrency());
}

void Engine::expect_network() {
  wait_policy_.expect_network();
  want_background_ = true;  // which looks at it from now on
  background_cv_.notify_one();
}

bool Engine::pass() {
  bool moved = groups_.progress();
  moved |= network_.progress(groups_);
  if (++passes_ % kPassesPerWatch == 0) moved |= groups_.watch(now_ns());
  return moved;
}

void Engine::leave_to_background(bool perhaps) {
  // The last sends have likely gone: to find that out costs less than to wake a thread, which would
  // then compete with the next operation for the lock.
  if (!busy()) return;
  if (!groups_.busy()) network_.progress(groups_);
  if (!busy()) return;
  if (perhaps && std::exchange(moments_, kMoments) > 0) return;
  want_background_ |= !perhaps;
  background_cv_.notify_one();
}

void Engine::yield(Lock& lk) {
  lk.unlock();
  uint64_t began = now_ns();
  sched_yield();
  uint64_t ended = now_ns();
  for (int i = 0; i < kYieldsToContenders && mutex_.wanted(); ++i) sched_yield();
  lk = lock();
  presence_.announce_core(sched_getcpu());
  wait_policy_.note_yield(began, ended);
}

bool Engine::spin() {
  for (int polls = wait_policy_.polls();; pause()) {
    if (pass() || !complete_.empty()) return true;
    if (--polls == 0 || mutex_.wanted() || stop_) return false;
  }
}

template <class Turn>
void Engine::drive(Lock& lk, Turn&& turn) {
  driving_ = true;
  try {
    turn();
  } catch (...) {
    if (!lk.owns_lock()) lk.lock();
    groups_.fail_busy(status_of_exception());
  }
  driving_ = false;
  run_complete(lk);
}

bool Engine::leave_shared_core() {
  if (!wait_policy_.may_leave_core(now_ns())) return false;
  int core = sched_getcpu();
  if (!neighbors_.any_polls_on(core) || !move_off(core)) return false;
  presence_.announce_core(sched_getcpu());
  ++times_moved_;
  return true;
}

void Engine::deliver(Task& task) noexcept {
  try {
    task.on_complete();
  } catch (...) {
    task.fail(status_of_exception());
  }
  task.complete_.store(true);
}

void Engine::run_complete(Lock& lk) {
  while (!complete_.empty()) {
    std::shared_ptr<Task> task = complete_.pop();
    lk.unlock();
    deliver(*task);
    task.reset();  // may free tensors: not under the lock
    lk = lock();
    notify_waiters();
  }
}

void Engine::notify_waiters() {
  if (waiters_ == 0) return;
  waiters_cv_.notify_all();
  if (sleeping_) presence_.notify_self();  // a waiter that sleeps as the driver
}

// Completes the only task in the queue, without taking the lock again. A thread that begins to wait for
// the task meanwhile raises waiters_, then looks at complete_, then sleeps; this thread sets complete_,
// then reads waiters_. All four are sequentially consistent: either that thread sees complete_, or this
// one sees waiters_.
void Engine::complete_alone(Lock lk) {
  std::shared_ptr<Task> task = complete_.pop();
  lk.unlock();
  deliver(*task);
  task.reset();  // may free tensors: not under the lock
  if (waiters_.load() == 0) return;
  lk = lock();
  notify_waiters();
}

void Engine::kick(Lock lk) {
  pass();
  release(std::move(lk), nullptr);
}

void Engine::release(Lock lk, const Task* awaited, bool perhaps) {
  // The awaited task is complete, or there is none: this thread will not drive the work in flight.
  bool undriven = awaited == nullptr || complete_.contains(awaited);
  if (undriven && !driving_ && waiters_ == 0) leave_to_background(perhaps);
  if (undriven && driving_ && sleeping_ && busy()) presence_.notify_self();  // for the new work
  if (complete_.has_one()) return complete_alone(std::move(lk));
  run_complete(lk);
}

void Engine::step(Lock& lk, uint64_t until, uint64_t spin_ns) {
  drive(lk, [&] {
    if (spin()) {
      wait_policy_.restart_spin();
      if (mutex_.wanted() || (spin_ns > 0 && waiters_ > 0 && wait_policy_.turn_is_over(now_ns)))
        yield(lk);
    } else if (wait_policy_.keeps_polling(now_ns(), spin_ns) || leave_shared_core()) {
      yield(lk);
    } else {
      sleep(lk, until);
    }
  });
}

bool Engine::gather_events() {
  try {
    events_.assign(1, {presence_.wait_fd(), POLLIN, 0});
    if (network_.wait_fd() >= 0) events_.push_back({network_.wait_fd(), POLLIN, 0});
    neighbors_.watch_deaths(events_);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

uint64_t Engine::wake_time(uint64_t now, uint64_t until) const {
  uint64_t wake = std::min({until, now + kLongestSleepNs, groups_.deadline_ns()});
  if (!network_.wakes()) return std::min(wake, now + wait_policy_.pause_ns(now));
  if (int limit_ms = network_.sleep_limit_ms(); limit_ms >= 0)
    wake = std::min(wake, now + static_cast<uint64_t>(limit_ms) * 1'000'000);
  return wake;
}

void Engine::sleep(Lock& lk, uint64_t until) {
  // Deaths first: a process that died may have published before, and the pass below sees all of it.
  if (!gather_events()) return yield(lk);
  presence_.announce_sleep();
  uint64_t now = now_ns();
  bool by_event = pass() || groups_.watch(now) || !complete_.empty(), pausing = !network_.wakes();
  if (!by_event) {
    uint64_t wake = wake_time(now, until);
    timespec timeout{};
    if (wake > now) {
      timeout.tv_sec = static_cast<time_t>((wake - now) / 1'000'000'000);
      timeout.tv_nsec = static_cast<long>((wake - now) % 1'000'000'000);
    }
    sleeping_ = true;
    lk.unlock();
    by_event = ppoll(events_.data(), events_.size(), &timeout, nullptr) > 0;
    lk.lock();
    sleeping_ = false;
  }
  presence_.announce_awake();
  presence_.drain();
  wait_policy_.note_sleep(by_event, pausing);
}

void Engine::sleep_beside_driver(Lock& lk, uint64_t until) {
  if (until == UINT64_MAX) {
    waiters_cv_.wait(lk);
  } else {
    waiters_cv_.wait_for(lk, std::chrono::nanoseconds(until - std::min(until, now_ns())));
  }
}

bool Engine::wait(const Task& task, std::chrono::nanoseconds timeout) {
  if (task.complete()) return true;
  Lock lk = lock();
  waiters_.fetch_add(1);
  // A driver that sleeps wakes for the new work; the background thread also lets this thread drive.
  if (driving_ && sleeping_) presence_.notify_self();
  if (!driving_) {  // a task that completes within a moment needs no clock
    drive(lk, [&] {
      wait_policy_.restart_spin();
      spin();
    });
  }
  uint64_t until = UINT64_MAX;
  if (timeout.count() > 0 && !task.complete_.load())
    until = now_ns() + static_cast<uint64_t>(timeout.count());
  while (!task.complete_.load() && (until == UINT64_MAX || now_ns() < until) && !stop_) {
    if (driving_) {
      sleep_beside_driver(lk, until);
    } else {
      step(lk, until, wait_policy_.spin_ns());
    }
  }
  if (waiters_.fetch_sub(1) > 1) {
    waiters_cv_.notify_all();  // one of them drives on
  } else if (!driving_) {
    leave_to_background();
  }
  return task.complete();
}

Status Engine::await(const Task& task) {
  if (wait(task)) return copy_of(task.status());
  return {Code::kAborted, "the process is ending, with an operation under way"};
}

void Engine::background() {
  Lock lk = lock();
  while (!stop_) {
    if (waiters_ > 0 || driving_ || !busy()) {
      if (waiters_ > 0 && !driving_) waiters_cv_.notify_all();
      want_background_ = false;
      auto wanted = [this] { return stop_ || want_background_ || moments_ > 0; };
      if (moments_ > 0) {
        --moments_;
        background_cv_.wait_for(lk, kMoment, [this] { return stop_ || want_background_; });
      } else if (!network_.works()) {
        background_cv_.wait(lk, wanted);
      } else if (!background_cv_.wait_for(lk, kIdleLook, wanted)) {
        if (waiters_ == 0 && !driving_) drive(lk, [this] { pass(); });
        continue;
      }
      wait_policy_.restart_spin();
      continue;
    }
    step(lk, UINT64_MAX,
         polls_unwaited() ? wait_policy_.background_polling_ns()
                          : wait_policy_.background_spin_ns());
  }
}

}  // namespace smddp
