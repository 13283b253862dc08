#include "progress/engine.h"

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/clock.h"
#include "common/env.h"
#include "common/log.h"
#include "common/processor.h"

namespace smddp {
namespace {

// Longest sleep. Wakes are exact; this only bounds the harm of a file descriptor that a provider
// forgot to signal.
constexpr uint64_t kLongestSleepNs = 100'000'000;
constexpr size_t kEarlyMessages = 4096;
constexpr uint64_t kFlushNs = 1'000'000'000;
// Looks in a row before the core is given up: a microsecond or two inside a host. A look at the network
// takes a system call, and its data comes through the kernel, which may want this core.
constexpr int kLooks = 32;
// Nobody waits for what the background thread drives: the core is better used by whoever computes.
// Between hosts it does not yield at all: on a core where somebody computes, a yield is over at the
// scheduler's next tick (4 ms with 250 Hz), while a message wakes a sleeper at once.
constexpr uint64_t kBackgroundSpinNs = 20'000;
// As many passes apart, groups look for what is late while something else moves.
constexpr uint32_t kPassesPerWatch = 1024;
// A yield that lasts longer has let somebody else run.
constexpr uint64_t kOwnCoreYieldNs = 2'000;
// A yield that lasts longer, per rank of this host that may have a turn on the core, has let somebody
// compute; a rank that stays away from its waits for longer computes itself. Where both is so, threads
// between hosts that wait and poll take the cores from those who compute, and lose them for a slice at the
// wrong time: the peers of a step wait. The background thread sleeps, and gets a core back when something
// arrives, as its slices are short. So it drives for them: for a while after such a yield, and as long as
// one of so many waits comes after computing.
constexpr uint64_t kComputesNs = 1'000'000;
constexpr uint64_t kTakenNs = 3'000'000'000;
constexpr int kComputingWaits = 8;
// How long a waiting thread works between hosts before it gives its core up: another rank's link may idle
// until that one has its turn. The background thread does not, as a yield may last for a tick.
constexpr uint64_t kTurnNs = 300'000;
// A thread that waits for the lock is waited for at most so many turns.
constexpr int kWays = 64;
// The shortest slice that Linux grants. The background thread has little to do at a time, and peers wait
// for it: with it, it gets a core from whoever computes at once, no longer at the next tick.
constexpr uint64_t kSliceNs = 100'000;

// Linux's sched_attr, version 0: glibc has neither the call nor, in older versions, the struct.
struct SchedulingAttributes {
  uint32_t size = sizeof(SchedulingAttributes);
  uint32_t policy = SCHED_OTHER;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0;  // the slice, from Linux 6.12 on; ignored before
  uint64_t deadline = 0;
  uint64_t period = 0;
};

// Leaves a thread alone that somebody gave another policy or priority.
void ask_for_short_slices() {
  SchedulingAttributes now;
  if (syscall(SYS_sched_getattr, 0, &now, sizeof now, 0) != 0) return;
  if (now.policy != SCHED_OTHER || now.nice != 0) return;
  SchedulingAttributes wanted;
  wanted.runtime = kSliceNs;
  (void)syscall(SYS_sched_setattr, 0, &wanted, 0);
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::create() {
  std::unique_ptr<Engine> engine(new Engine());
  auto presence = intranode::Presence::create();
  if (!presence) return presence.status();
  engine->presence_ = std::move(presence.value());
  engine->spin_ns_ = static_cast<uint64_t>(
      1000 * std::max(0.0, env::get_number("SPIN_MICROSECONDS").value_or(200)));
  engine->thread_ = std::thread([raw = engine.get()] { raw->background(); });
  return engine;
}

Engine::~Engine() { shutdown(); }

bool Engine::forked() const { return fork_count() != forks_; }

bool Engine::ended() const { return stop_ || forked(); }

void Engine::shutdown() {
  if (forked()) {  // the thread is the parent's
    if (thread_.joinable()) thread_.detach();
    return;
  }
  Lock lk = lock();
  if (stop_) return;
  stop_ = true;
  background_cv_.notify_all();
  waiters_cv_.notify_all();
  presence_->ring_self();
  lk.unlock();
  thread_.join();
  lk.lock();
  for (auto& [key, group] : groups_) group->leave();
  groups_.clear();
  uint64_t until = now_ns() + kFlushNs;
  while (endpoint_ && !endpoint_->idle() && now_ns() < until) {
    if (auto moved = endpoint_->progress(*this); !moved || moved.value() == 0) sched_yield();
  }
  endpoint_.reset();
}

Result<fabric::Endpoint*> Engine::fabric() {
  Lock lk = lock();
  if (!endpoint_) {
    auto endpoint = fabric::Endpoint::open(fabric::options_from_env());
    if (!endpoint) return endpoint.status();
    endpoint_ = std::move(endpoint.value());
  }
  return endpoint_.get();
}

fabric::Endpoint* Engine::open_fabric() {
  Lock lk = lock();
  return endpoint_.get();
}

Status Engine::reaches(const fabric::MemoryOwner& owner) {
  Lock lk = lock();
  return endpoint_ ? endpoint_->reaches(owner) : Status(Code::kUnavailable, "no fabric is open");
}

Status Engine::lend(std::byte* at, size_t bytes, const fabric::MemoryOwner& owner) {
  Lock lk = lock();
  if (!endpoint_) return {Code::kUnavailable, "no fabric is open"};
  return endpoint_->lend(at, bytes, owner);
}

void Engine::take_back(std::byte* at) {
  Lock lk = lock();
  if (endpoint_) endpoint_->take_back(at);
}

Result<std::shared_ptr<intranode::Neighbor>> Engine::neighbor(const RankInfo& info) {
  Lock lk = lock();
  if (auto known = neighbors_[info.token].lock()) return known;
  std::erase_if(neighbors_, [](const auto& entry) { return entry.second.expired(); });
  auto opened = intranode::Neighbor::open(info.pid, info.token, info.presence_fd, info.doorbell_fd);
  if (!opened) return opened.status();
  std::shared_ptr<intranode::Neighbor> neighbor = std::move(opened.value());
  neighbors_[info.token] = neighbor;
  return neighbor;
}

void Engine::attach(const JobKey& key, Progressable* group) {
  Lock lk = lock();
  groups_[key] = group;
  for (size_t i = 0; i < early_.size();) {
    if (early_[i].first.key != key) {
      ++i;
      continue;
    }
    group->on_message(early_[i].first, early_[i].second.data());
    early_.erase(early_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Engine::detach(const JobKey& key) {
  Lock lk = lock();
  groups_.erase(key);
  run_finished(lk);
}

void Engine::expect_local_ranks(int ranks) {
  Lock lk = lock();
  uint64_t cores = std::max(1u, std::thread::hardware_concurrency());
  turns_ = std::max(turns_, (static_cast<uint64_t>(ranks) + cores - 1) / cores);
}

void Engine::on_message(const std::byte* data, size_t size) {
  if (!wire::check(data, size)) {
    ++foreign_messages_;
    return;
  }
  wire::Header header;
  std::memcpy(&header, data, sizeof header);
  auto group = groups_.find(header.key);
  if (group != groups_.end()) {
    group->second->on_message(header, data + sizeof header);
    return;
  }
  // Either a group that this rank is still making, or one it has left, or a stranger. Data only
  // ever follows a READY of ours, so what comes early is small.
  if (header.type == wire::Type::kData || header.bytes > kReasonBytes) {
    ++foreign_messages_;
    return;
  }
  if (early_.size() == kEarlyMessages) {
    early_.pop_front();
    ++foreign_messages_;
  }
  early_.emplace_back(header, std::vector<std::byte>(data + sizeof header, data + size));
}

void Engine::on_peer_lost(fabric::Peer peer, const Status& why) {
  for (auto& [key, group] : groups_) group->on_peer_lost(peer, why);
}

void Engine::finish(std::shared_ptr<Task> task, Status status) {
  task->status_ = std::move(status);
  finished_.push_back(std::move(task));
}

bool Engine::groups_busy() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const auto& g) { return g.second->busy(); });
}

bool Engine::busy() const { return (endpoint_ && !endpoint_->idle()) || groups_busy(); }

bool Engine::pass() {
  bool moved = false;
  for (auto& [key, group] : groups_) {
    if (group->busy()) moved |= group->progress();
  }
  moved |= look_at_network();
  if (++passes_ % kPassesPerWatch == 0) moved |= watch(now_ns());
  return moved;
}

bool Engine::look_at_network() {
  if (!endpoint_) return false;
  auto events = endpoint_->progress(*this);
  if (!events) log(LogLevel::kError, events.status().message());
  return events && events.value() > 0;
}

void Engine::leave_to_background() {
  // The last sends are likely over: to find that out costs less than to wake a thread, which would
  // then want the lock from the next operation.
  if (!busy()) return;
  if (!groups_busy()) look_at_network();
  if (!busy()) return;
  want_background_ = true;
  background_cv_.notify_one();
}

bool Engine::watch(uint64_t now) {
  bool moved = false;
  for (auto& [key, group] : groups_) {
    if (group->busy()) moved |= group->watch(now);
  }
  return moved;
}

Engine::Lock Engine::lock() {
  Lock lk(mutex_, std::try_to_lock);
  if (!lk) {
    contenders_.fetch_add(1, std::memory_order_relaxed);
    lk.lock();
    contenders_.fetch_sub(1, std::memory_order_relaxed);
  }
  return lk;
}

bool Engine::turn_is_over() {
  if (!endpoint_) return false;
  uint64_t now = now_ns();
  if (turn_began_ns_ == 0) turn_began_ns_ = now;
  if (now - turn_began_ns_ < kTurnNs) return false;
  turn_began_ns_ = 0;
  return true;
}

// The mutex is not fair: whoever unlocks it and takes it again at once keeps the others out.
void Engine::give_way(Lock& lk) {
  lk.unlock();
  uint64_t before = now_ns();
  sched_yield();
  uint64_t now = now_ns();
  bool shared = now - before > kOwnCoreYieldNs;
  bool taken = now - before > kComputesNs * turns_;
  for (int i = 0; i < kWays && contenders_.load(std::memory_order_relaxed) > 0; ++i) sched_yield();
  lk = lock();
  shares_core_ = shared;
  if (taken) taken_until_ns_ = now + kTakenNs;
}

bool Engine::background_drives_for_waiters() const {
  return computing_waits_ > 0 && taken_until_ns_ != 0 && now_ns() < taken_until_ns_;
}

bool Engine::spin() {
  for (int looks = turns_ > 1 || spin_ns_ == 0 || endpoint_ ? 1 : kLooks;; pause()) {
    if (pass() || !finished_.empty()) return true;
    if (--looks == 0 || contenders_.load(std::memory_order_relaxed) > 0 || stop_) return false;
  }
}

void Engine::run_finished(Lock& lk) {
  while (!finished_.empty()) {
    std::shared_ptr<Task> task = std::move(finished_.front());
    finished_.pop_front();
    lk.unlock();
    task->on_done();
    task->done_.store(true, std::memory_order_release);
    task.reset();  // may free tensors: not under the lock
    lk = lock();
    notify_waiters();
  }
}

void Engine::notify_waiters() {
  if (waiters_ == 0) return;
  waiters_cv_.notify_all();
  if (sleeping_) presence_->ring_self();  // a waiter that sleeps as the driver
}

// The only finished task, without taking the lock again. A thread that comes to wait for the task
// meanwhile raises waiters_, then looks at done_, then sleeps; here done_ is set, then waiters_ read.
// All four are sequentially consistent: either it sees done_, or this thread sees it wait.
void Engine::finish_alone(Lock lk) {
  std::shared_ptr<Task> task = std::move(finished_.front());
  finished_.pop_front();
  lk.unlock();
  task->on_done();
  task->done_.store(true);
  task.reset();  // may free tensors: not under the lock
  if (waiters_.load() == 0) return;
  lk = lock();
  notify_waiters();
}

void Engine::kick(Lock lk) {
  pass();
  release(std::move(lk), nullptr);
}

void Engine::release(Lock lk, const Task* awaited) {
  // The awaited task is over, or there is none: all other work in flight has no driver here.
  bool leaves =
      awaited == nullptr || std::any_of(finished_.begin(), finished_.end(),
                                        [&](const auto& task) { return task.get() == awaited; });
  if (leaves && !driving_ && waiters_ == 0) leave_to_background();
  if (leaves && driving_ && sleeping_ && busy()) presence_->ring_self();  // for the new work
  if (finished_.size() == 1) return finish_alone(std::move(lk));
  run_finished(lk);
}

void Engine::step(Lock& lk, uint64_t until, uint64_t spin_ns) {
  driving_ = true;
  if (spin()) {
    idle_since_ns_ = 0;
    if (contenders_.load(std::memory_order_relaxed) > 0 || (spin_ns > 0 && turn_is_over()))
      give_way(lk);
  } else {
    uint64_t now = now_ns();
    turn_began_ns_ = 0;
    if (idle_since_ns_ == 0) idle_since_ns_ = now;
    // Two ranks that yield to one another on one core stay there, however idle the next one is; whoever
    // sleeps is woken on an idle core. Between hosts a sleep costs more than it may bring.
    bool crowded = std::exchange(shares_core_, false) && turns_ == 1 && !endpoint_;
    if (now - idle_since_ns_ < spin_ns && !crowded) {
      give_way(lk);
    } else {
      sleep(lk, until);
    }
  }
  driving_ = false;
  run_finished(lk);
}

void Engine::sleep(Lock& lk, uint64_t until) {
  // Deaths first: whoever died may have published before, and the pass below will see all of it.
  std::vector<pollfd> fds{{presence_->wait_fd(), POLLIN, 0}};
  if (endpoint_ && endpoint_->wait_fd() >= 0) fds.push_back({endpoint_->wait_fd(), POLLIN, 0});
  // One look at all of them, however many ranks share the host.
  size_t first = fds.size();
  std::vector<std::shared_ptr<intranode::Neighbor>> watched;
  for (auto& [token, weak] : neighbors_) {
    auto neighbor = weak.lock();
    if (!neighbor || neighbor->death_fd() < 0 || neighbor->dead()) continue;
    fds.push_back({neighbor->death_fd(), POLLIN, 0});
    watched.push_back(std::move(neighbor));
  }
  if (!watched.empty() && poll(&fds[first], watched.size(), 0) > 0) {
    for (size_t i = 0; i < watched.size(); ++i) {
      if ((fds[first + i].revents & POLLIN) == 0) continue;
      watched[i]->mark_dead();
      fds[first + i].fd = -1;  // ppoll passes over it
    }
  }
  watched.clear();
  presence_->announce_sleep();
  uint64_t now = now_ns();
  bool moved = pass() || watch(now);
  if (!moved && finished_.empty()) {
    uint64_t wake = std::min(until, now + kLongestSleepNs);
    for (auto& [key, group] : groups_) wake = std::min(wake, group->deadline_ns());
    if (endpoint_) {
      bool exact = endpoint_->wait_fd() >= 0 && endpoint_->may_sleep();
      int limit_ms = exact ? endpoint_->sleep_limit_ms() : 1;
      if (limit_ms >= 0) wake = std::min(wake, now + static_cast<uint64_t>(limit_ms) * 1'000'000);
    }
    timespec timeout{};
    if (wake > now) {
      timeout.tv_sec = static_cast<time_t>((wake - now) / 1'000'000'000);
      timeout.tv_nsec = static_cast<long>((wake - now) % 1'000'000'000);
    }
    sleeping_ = true;
    lk.unlock();
    ppoll(fds.data(), fds.size(), &timeout, nullptr);
    lk.lock();
    sleeping_ = false;
  }
  presence_->announce_awake();
  presence_->drain();
  idle_since_ns_ = 0;
}

bool Engine::wait(const Task& task, std::chrono::nanoseconds timeout) {
  if (task.done()) return true;
  Lock lk = lock();
  waiters_.fetch_add(1);
  if (endpoint_ && wait_ended_ns_ != 0) {
    bool computed = now_ns() - wait_ended_ns_ > kComputesNs;
    computing_waits_ = computed ? kComputingWaits : std::max(0, computing_waits_ - 1);
  }
  // The background thread makes room, or looks at what is new before it sleeps on.
  if (driving_ && sleeping_) presence_->ring_self();
  if (!driving_) {  // what comes within a moment needs no clock
    driving_ = true;
    idle_since_ns_ = 0;
    spin();
    driving_ = false;
    run_finished(lk);
  }
  uint64_t until = UINT64_MAX;
  if (timeout.count() > 0 && !task.done_.load())
    until = now_ns() + static_cast<uint64_t>(timeout.count());
  while (!task.done_.load() && (until == UINT64_MAX || now_ns() < until) && !stop_) {
    if (!driving_ && !(background_drives_for_waiters() && busy())) {
      step(lk, until, spin_ns_);
      continue;
    }
    if (!driving_) {
      ++waits_left_to_background_;
      want_background_ = true;
      background_cv_.notify_one();
    }
    if (until == UINT64_MAX) {
      waiters_cv_.wait(lk);
    } else {
      waiters_cv_.wait_for(lk, std::chrono::nanoseconds(until - std::min(until, now_ns())));
    }
  }
  if (endpoint_) wait_ended_ns_ = now_ns();
  if (waiters_.fetch_sub(1) > 1) {
    waiters_cv_.notify_all();  // one of them drives on
  } else if (!driving_) {
    leave_to_background();
  }
  return task.done();
}

void Engine::background() {
  ask_for_short_slices();
  Lock lk = lock();
  while (!stop_) {
    if ((waiters_ > 0 && !background_drives_for_waiters()) || driving_ || !busy()) {
      if (waiters_ > 0 && !driving_) waiters_cv_.notify_all();
      want_background_ = false;
      background_cv_.wait(lk, [this] { return stop_ || want_background_; });
      continue;
    }
    step(lk, UINT64_MAX, endpoint_ ? 0 : std::min(spin_ns_, kBackgroundSpinNs * turns_));
  }
}

}  // namespace smddp
