// The progress engine: one per process (progress/process.h), shared by all its groups. It drives groups and the
// network, and completes tasks. It does not know what a collective is. Groups give it work and tasks; the
// threads that wait for a task call wait().
//
// One thread at a time drives: it takes the lock, advances every busy group and the network, and
// sleeps with the lock released when nothing moves. A thread that waits for a task becomes the
// driver if there is none, so on the critical path no other thread has to run. The background
// thread drives while something is in flight that no thread waits for, and else looks now and then what the
// network has brought: a peer that leaves waits until it is taken. Groups and the fabric endpoint are touched
// only under the lock.
//
// Nothing throws through the engine. What a call into a group throws breaks that group, what a task's
// on_complete() throws becomes the task's status, and the engine drives on.
//
// A driver that finds nothing to do first polls again at once, for a microsecond or two, then
// yields the processor between polls, then sleeps. If the ranks of a host outnumber its cores, the
// rank that the driver waits for may need this very core: there the driver yields after the first
// poll (WaitPolicy).
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common/condition_variable.h"
#include "common/forks.h"
#include "intranode/neighbors.h"
#include "intranode/presence.h"
#include "progress/counted_mutex.h"
#include "progress/groups.h"
#include "progress/network.h"
#include "progress/task.h"
#include "progress/wait_policy.h"

namespace smddp {

class Engine {
 public:
  // All must outlive it. The presence is its own process's.
  Engine(intranode::Presence& presence, intranode::Neighbors& neighbors, Network& network);
  ~Engine();
  // Starts the background thread. To be called once, before anything else.
  Status start();

  using Lock = CountedMutex::Lock;
  Lock lock() { return mutex_.lock(); }
  // Whether other threads wait for the lock.
  bool wanted() const { return mutex_.wanted(); }
  // How often a thread that is going to wait looks for what it waits for, before it lets others have the lock. Under
  // the lock.
  int polls() const { return driving_ ? 1 : wait_policy_.polls(); }

  // So many more groups are being made, or fewer. A new one gets a new endpoint if the old one is worn and
  // no other group needs it.
  void count_making(int groups);
  void attach(const JobKey& key, Progressable* group);
  // After it returns no call into the group is under way or will come.
  void detach(const JobKey& key);
  // Puts a complete task into the queue of those whose on_complete() runs next. Under the lock. Once for
  // each task: later calls change nothing.
  void complete(std::shared_ptr<Task> task, Status status) {
    complete_.push(std::move(task), std::move(status));
  }
  void complete(TaskQueue&& tasks) { complete_.append(std::move(tasks)); }

  // Releases `lock`, under which the caller added work, and runs what is complete. The caller is going
  // to wait for `awaited` (nullptr: for nothing). Work that this wait will not drive, because the
  // task is complete or there is none, is left to the background thread. `perhaps`: that thread looks at it
  // after a moment only, as the caller is likely to wait for it before.
  void release(Lock lock, const Task* awaited, bool perhaps = false);
  // Advances all groups and the network once, then release(lock, nullptr).
  void kick(Lock lock);
  // Drives until `task` is complete, or `timeout` is over (zero: no limit). False in the second case.
  bool wait(const Task& task, std::chrono::nanoseconds timeout = {});
  // Without a limit, and returns the task's status; an error as well if the engine ends before the task is complete.
  Status await(const Task& task);
  // `ranks` ranks of one group share this host. If they outnumber the cores, waiting threads must
  // not spin.
  void expect_local_ranks(int ranks);
  // The network has been opened: waiting threads poll it as well. Under the lock.
  void expect_network();
  // For the end of the process: groups leave, messages under way get some seconds to arrive, and
  // nothing runs any more. Tasks that were in flight stay incomplete.
  void shutdown();
  // True after shutdown(), and in a child that was forked from the process that made the engine:
  // groups must not touch it.
  bool ended() const { return stop_ || forked(); }
  bool forked() const { return fork_count() != forks_; }
  // Messages of no member of a group, which were dropped. Under the lock.
  uint64_t foreign_messages() const { return groups_.foreign_messages(); }
  uint64_t times_moved() const { return times_moved_; }  // off a shared core

 private:
  friend class SimulatedEngine;

  bool busy() const { return network_.busy() || groups_.busy(); }
  // No thread waits, and no event ends a sleep of the background thread.
  bool polls_unwaited() const { return waiters_ == 0 && !network_.wakes(); }
  // Under the lock, like all that follow. Throws nothing.
  bool pass();
  // Wakes the background thread if something is in flight; `perhaps`: lets it look within kMoment.
  void leave_to_background(bool perhaps = false);

  // Calls turn() as the driver, then runs what is complete.
  template <class Turn>
  void drive(Lock& lock, Turn&& turn);
  // One turn as the driver, with sleep after `spin_ns` without success; runs what is complete.
  void step(Lock& lock, uint64_t until, uint64_t spin_ns);
  bool spin();             // passes until one moves something, for a moment
  void yield(Lock& lock);  // lets other threads of this process have the lock, and others the core
  // After WaitPolicy::keeps_polling() has said false: leaves a core on which another rank polls as well, when the
  // policy allows it. True: the calling thread has moved.
  bool leave_shared_core();
  void sleep(Lock& lock, uint64_t until);
  bool gather_events();  // to sleep on; false: there is no memory for them
  uint64_t wake_time(uint64_t now, uint64_t until) const;
  // Waits until the driver has completed a task or lets another thread drive.
  void sleep_beside_driver(Lock& lock, uint64_t until);

  static void deliver(Task& task) noexcept;
  void run_complete(Lock& lock);
  void complete_alone(Lock lock);
  void notify_waiters();
  void background();

  CountedMutex mutex_;
  intranode::Presence& presence_;
  intranode::Neighbors& neighbors_;
  Network& network_;
  Groups groups_;
  TaskQueue complete_;
  WaitPolicy wait_policy_;
  uint64_t times_moved_ = 0;
  std::vector<pollfd> events_;

  std::condition_variable waiters_cv_, background_cv_;
  // Changes under the lock; complete_alone() reads it without.
  std::atomic<int> waiters_{0};
  bool driving_ = false;
  bool sleeping_ = false;
  bool want_background_ = false;
  int moments_ = 0;  // in which the background thread still looks again after kMoment
  std::atomic<bool> stop_{false};
  uint32_t passes_ = 0;
  const uint32_t forks_ = fork_count();
  std::thread thread_;
};

}  // namespace smddp
