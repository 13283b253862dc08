// How threads wait in the engine: how often a thread polls before it yields, how long it polls and
// yields before it sleeps, and how long it sleeps where no event of the network ends a sleep. To poll is
// to advance all groups and the network once.
//
// It decides from times alone, and knows no lock, no thread, no group and no network. A time that
// is needed only in some cases comes as a clock, a callable that returns nanoseconds; it is read at
// most once per call. Called by Engine, under its lock.
#pragma once

#include <algorithm>
#include <cstdint>

namespace smddp {

class WaitPolicy {
 public:
  WaitPolicy() = default;
  // `spin_ns`: how long a waiting thread polls and yields without success before it sleeps.
  explicit WaitPolicy(uint64_t spin_ns) : spin_ns_(spin_ns) {}
  static WaitPolicy from_env();

  // This process is one of `ranks` ranks on a host with `cores` cores. The largest ratio counts.
  void expect_local_ranks(int ranks, unsigned cores);
  // The process has opened the network: from now on threads poll it as well.
  void expect_network() { network_ = true; }

  // Polls in a row before the thread yields or sleeps.
  int polls() const { return ranks_per_core_ > 1 || spin_ns_ == 0 || network_ ? 1 : kPolls; }
  // How long a thread polls without success before it sleeps: a thread that waits, and the
  // background thread.
  uint64_t spin_ns() const { return spin_ns_; }
  uint64_t background_spin_ns() const {
    return network_ ? 0 : std::min(spin_ns_, kBackgroundSpinNs * ranks_per_core_);
  }
  // The same of the background thread on a network that has no wait object (efa).
  uint64_t background_polling_ns() const { return std::min(spin_ns_, kBackgroundPollingNs); }
  // A poll found work, or a wait begins: the time without success begins with the next poll.
  void restart_spin() { idle_since_ns_ = 0; }
  // A sleep ended. `by_event`: not because its time was over. `pausing`: its time was pause_ns().
  void note_sleep(bool by_event, bool pausing) {
    // After a pause a thread polls once: it has polled for its time before.
    if (by_event || !pausing) restart_spin();
  }
  // The longest sleep while operations are in flight on a network that has no wait object (efa).
  uint64_t pause_ns(uint64_t now) const {
    uint64_t idle = idle_since_ns_ == 0 ? 0 : now - std::min(now, idle_since_ns_);
    return std::clamp(idle / kPausesPerWait, kShortestPauseNs, kLongestPauseNs);
  }
  // The last polls found nothing. True: yield, then poll again. False: sleep. `spin_ns` is one of
  // the two above.
  bool keeps_polling(uint64_t now, uint64_t spin_ns);
  // After keeps_polling() has said false. True: another thread ran during the last yield though there is a core for
  // each rank, so if that was a rank, this thread may go to another core.
  bool may_leave_core(uint64_t now);
  // A poll of a waiting thread found work. True: it has worked for so long that it yields.
  template <class Clock>
  bool turn_is_over(Clock&& clock);
  // A yield began and ended at these times.
  void note_yield(uint64_t began, uint64_t ended) {
    shares_core_ = ended - began > kOwnCoreYieldNs;
  }

 private:
  // Inside a host: a microsecond or two. A yield is a system call of 0.3 us (2026-11-21, AMD EPYC). To poll the network
  // takes a system call, and its data comes through the kernel, which may need this core: then a thread polls
  // once (1 MiB on 4 x 1: 7.0 ms for 7.3). Inside a host 8 and 128 take as long (2026-11-29-constants).
  static constexpr int kPolls = 32;
  // No thread waits for the work that the background thread drives, so threads that compute make
  // better use of the core. Between hosts the background thread does not yield at all: on a core
  // where another thread computes, a yield lasts until the scheduler's next tick (4 ms with 250
  // Hz), while a message wakes a sleeping thread at once. Not measured.
  static constexpr uint64_t kBackgroundSpinNs = 20'000;
  // Without a wait object, a message of 8 KiB over 1 Gbit/s takes 65 us, and a pause at its end delays the next one
  // (2026-11-25-no-wait-object, AMD EPYC).
  static constexpr uint64_t kBackgroundPollingNs = 100'000;
  // Without a wait object, a thread pauses between two polls for the time in which a few chunks arrive, and
  // for a part of the time in which nothing has moved: what it waits for is seen late by an eighth of its time
  // at most, and a wait of 8 ms takes about 40 polls. It does not yield in place of a pause: a yield may last
  // for a tick, while a timer that ends gets the core back. Not measured: the shortest and the longest.
  static constexpr uint64_t kPausesPerWait = 8;
  static constexpr uint64_t kShortestPauseNs = 20'000;
  static constexpr uint64_t kLongestPauseNs = 1'000'000;
  // A yield that takes longer has let another thread run: by itself it takes 0.3 us (2026-11-21, AMD EPYC).
  static constexpr uint64_t kOwnCoreYieldNs = 2'000;
  // The other cores may be just as busy: then a move is in vain, and costs a few microseconds. Once in 5 ms is too rarely
  // (2026-11-26-after-idle, AMD EPYC).
  static constexpr uint64_t kLeavingNs = 1'000'000;
  // Between hosts a waiting thread that finds work yields its core after this time: the link of
  // another rank may be idle until that rank runs: ReduceScatter of 64 MiB on 2 x 2 284 ms for 288 (2026-11-22, AMD EPYC).
  // Not measured: other times. The background thread does not, as a yield may last for a tick.
  static constexpr uint64_t kTurnNs = 300'000;

  uint64_t spin_ns_ = 0;         // from the first poll without success to sleep
  uint64_t ranks_per_core_ = 1;  // above 1, the ranks of this host take turns on a core
  bool network_ = false;
  uint64_t idle_since_ns_ = 0;  // the first of the polls without success; 0: none
  uint64_t turn_began_ns_ = 0;  // the first of the polls with success; 0: none
  bool shares_core_ = false;    // found by the last yield
  bool crowded_ = false;        // found by the last keeps_polling()
  uint64_t may_leave_from_ns_ = 0;
};

template <class Clock>
bool WaitPolicy::turn_is_over(Clock&& clock) {
  if (!network_) return false;
  uint64_t now = clock();
  if (turn_began_ns_ == 0) turn_began_ns_ = now;
  if (now - turn_began_ns_ < kTurnNs) return false;
  turn_began_ns_ = 0;
  return true;
}

}  // namespace smddp
