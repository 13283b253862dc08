// The progress engine: one per process, shared by all its groups.
//
// One thread at a time drives: it takes the lock, advances every busy group and the fabric, and
// sleeps with the lock released when nothing moves. A thread that waits for a task becomes the
// driver if there is none, so on the critical path no other thread has to run. The background
// thread drives while something is in flight that nobody waits for, and between hosts also where
// the cores are wanted for computing. Groups and the fabric
// endpoint are touched only under the lock.
//
// A driver that finds nothing to do first looks again at once, for a microsecond or two, then gives up
// the processor between looks, then sleeps. Where the ranks of a host outnumber its cores, whoever is
// waited for may need this very core: there it gives it up after the first look.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bootstrap/exchange.h"
#include "common/forks.h"
#include "common/staging.h"
#include "fabric/endpoint.h"
#include "fabric/wire.h"
#include "intranode/presence.h"
#include "progress/task.h"

namespace smddp {

// A group, as the engine sees it. Every call comes under the engine's lock.
class Progressable {
 public:
  virtual ~Progressable() = default;
  virtual bool busy() const = 0;
  // Advances what can be advanced. True when anything moved. Comes in a tight loop.
  virtual bool progress() = 0;
  // Now and then, and before the engine sleeps: looks for what is late or dead. True when that gives
  // progress() something to do.
  virtual bool watch(uint64_t now_ns) = 0;
  virtual uint64_t deadline_ns() const = 0;  // the earliest, UINT64_MAX for none
  virtual void on_message(const wire::Header& header, const std::byte* payload) = 0;
  virtual void on_peer_lost(fabric::Peer peer, const Status& why) = 0;
  // The process ends: tells the peers if they still wait for this rank. The last call.
  virtual void leave() = 0;
};

class Engine : private fabric::Sink {
 public:
  static Result<std::unique_ptr<Engine>> create();
  ~Engine() override;

  const intranode::Presence& presence() const { return *presence_; }
  // Opens the process's endpoint on first use.
  Result<fabric::Endpoint*> fabric();
  // nullptr where nobody has used it.
  fabric::Endpoint* open_fabric();
  // As the endpoint's; kUnavailable where none is open.
  Status reaches(const fabric::MemoryOwner& owner);
  Status lend(std::byte* at, size_t bytes, const fabric::MemoryOwner& owner);
  void take_back(std::byte* at);
  // The process behind `card`, shared by all groups that contain it.
  Result<std::shared_ptr<intranode::Neighbor>> neighbor(const RankInfo& info);

  using Lock = std::unique_lock<std::mutex>;
  Lock lock();

  void attach(const JobKey& key, Progressable* group);
  // After it returns no call into the group is under way or will come.
  void detach(const JobKey& key);
  // Puts a task that is over into the line of those whose on_done() runs next. Under the lock.
  void finish(std::shared_ptr<Task> task, Status status);

  // Memory for the groups' rounds. Under the lock.
  StagingPool& staging() { return staging_; }
  // Keeps `what` until the endpoint is gone: memory that the network may still touch.
  void keep_until_fabric_closes(std::shared_ptr<void> what) {
    kept_until_fabric_closes_.push_back(std::move(what));
  }

  // Releases `lock`, under which the caller added work, and runs what finished. The caller is going to
  // wait for `awaited` (nullptr: for nothing). Work that this wait will not drive, because the task is
  // over or there is none, is left to the background thread.
  void release(Lock lock, const Task* awaited);
  // Advances all groups and the network once, then release(lock, nullptr).
  void kick(Lock lock);
  // Drives until `task` is done, or `timeout` is over (zero: no limit). False on the latter.
  bool wait(const Task& task, std::chrono::nanoseconds timeout = {});
  // Oversubscribed hosts must not spin: ranks of the largest group on this host.
  void expect_local_ranks(int ranks);
  // For the end of the process: groups leave, messages under way get a moment to go out, and nothing
  // runs any more. Tasks that were in flight stay undone.
  void shutdown();
  // True after shutdown(), and in a child that was forked from the process that made the engine:
  // groups must not touch it.
  bool ended() const;
  bool forked() const;
  // Messages dropped because they carried no group's key, or were malformed.
  uint64_t foreign_messages() const { return foreign_messages_; }
  // How often a waiting thread left the driving to the background thread.
  uint64_t waits_left_to_background() const { return waits_left_to_background_; }

 private:
  Engine() = default;
  void on_message(const std::byte* data, size_t size) override;
  void on_peer_lost(fabric::Peer peer, const Status& why) override;

  bool groups_busy() const;
  bool busy() const;
  bool pass();  // under the lock, like all that follow
  bool look_at_network();
  void leave_to_background();  // what is still in flight when nobody waits or drives any more
  bool watch(uint64_t now);
  bool background_drives_for_waiters() const;
  bool spin();                // passes until one moves something, for a moment
  bool turn_is_over();        // of a thread that works without a pause
  void give_way(Lock& lock);  // lets other threads of this process have it, and the core
  void notify_waiters();
  // One turn at driving, with sleep after `spin_ns` in vain; runs what finished.
  void step(Lock& lock, uint64_t until, uint64_t spin_ns);
  void sleep(Lock& lock, uint64_t until);
  void run_finished(Lock& lock);
  void finish_alone(Lock lock);
  void background();

  std::mutex mutex_;
  std::unique_ptr<intranode::Presence> presence_;
  StagingPool staging_;
  std::vector<std::shared_ptr<void>> kept_until_fabric_closes_;
  std::unique_ptr<fabric::Endpoint> endpoint_;  // goes before what is buried
  std::map<JobKey, Progressable*> groups_;
  std::map<uint64_t, std::weak_ptr<intranode::Neighbor>> neighbors_;  // by token
  std::deque<std::shared_ptr<Task>> finished_;

  // Messages whose group this rank has not made yet: a peer may be ahead by one bootstrap.
  std::deque<std::pair<wire::Header, std::vector<std::byte>>> early_;
  uint64_t foreign_messages_ = 0;

  std::condition_variable waiters_cv_, background_cv_;
  // Changes under the lock; finish_alone() reads it without.
  std::atomic<int> waiters_{0};
  std::atomic<int> contenders_{0};  // threads that found the lock taken
  bool driving_ = false;
  bool sleeping_ = false;
  bool want_background_ = false;
  std::atomic<bool> stop_{false};
  uint64_t spin_ns_ = 0;  // from the first look in vain to sleep
  uint64_t idle_since_ns_ = 0;
  uint64_t turn_began_ns_ = 0;
  bool shares_core_ = false;     // as the last yield found
  uint64_t taken_until_ns_ = 0;  // a core by who computes, as the last long yield found
  uint64_t wait_ended_ns_ = 0;   // the last one
  int computing_waits_ = 0;      // falls to 0 where no wait comes after computing
  uint64_t waits_left_to_background_ = 0;
  uint32_t passes_ = 0;
  uint64_t turns_ = 1;  // ranks of this host per core: above 1, they take turns on it
  const uint32_t forks_ = fork_count();
  std::thread thread_;
};

}  // namespace smddp
