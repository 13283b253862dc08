// Which thread drives: the one that waits, another one that waits, or the background thread; and that a
// driver that sleeps wakes for what happens meanwhile.
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <thread>

#include "common/clock.h"
#include "debug_setting.h"
#include "two_cores.h"
#include "world.h"

namespace smddp {
namespace {

using std::chrono::milliseconds;

TEST(Driving, AThreadLeavesACoreOnWhichAnotherRankPolls) {
  TwoCores cores;
  cpu_set_t before;
  sched_getaffinity(0, sizeof before, &before);
  if (!cores.take(1)) GTEST_SKIP() << "this process has one core, or may not choose";
  sched_setaffinity(0, sizeof before, &before);
  std::atomic<uint64_t> left{0};
  run_world("AA", [&](RankContext& c) {
    uint64_t any = 0;
    for (int turn = 0; turn < 2000 && any == 0; ++turn) {
      (void)cores.take(0);  // both ranks, which may then go where they want
      sched_setaffinity(0, sizeof before, &before);
      std::vector<int> in{static_cast<int>(c.engine.times_moved())}, out(2);
      for (int call = 0; call < 10; ++call) {
        Status status = c.run(gather_of(in, out, c.ranks));
        ASSERT_TRUE(status.ok()) << status.message();
      }
      any = static_cast<uint64_t>(out[0] + out[1]);
    }
    left += c.engine.times_moved();
    cpu_set_t after;
    sched_getaffinity(0, sizeof after, &after);
    EXPECT_TRUE(CPU_EQUAL(&after, &before));
  });
  EXPECT_GT(left, 0u);
}

// What a network kept, and what a task holds, may be tensors, whose end takes the interpreter's lock.
TEST(Locks, TensorsAreFreedWithoutTheEnginesLock) {
  auto process = std::move(Process::create(ShuffledTransport::open).value());
  ASSERT_TRUE(process->fabric().ok());
  struct Kept : Operation {
    Kept(Engine& of, bool& free) : engine(of), lock_is_free(free) {}
    Engine& engine;
    std::shared_ptr<std::promise<void>> taken = std::make_shared<std::promise<void>>();
    bool& lock_is_free;
    ~Kept() override {
      std::thread([this, at = &engine, said = taken] {
        Engine::Lock lock = at->lock();
        said->set_value();
      }).detach();
      lock_is_free =
          taken->get_future().wait_for(std::chrono::seconds(2)) == std::future_status::ready;
    }
  };
  Engine& engine = process->engine();
  bool after_network = false, after_tasks[2] = {};
  {
    Engine::Lock lock = engine.lock();
    process->network().keep(std::make_unique<Kept>(engine, after_network));
    process->network().wear();
  }
  engine.count_making(1);
  EXPECT_TRUE(after_network);
  engine.count_making(-1);
  Engine::Lock lock = engine.lock();
  for (bool& after : after_tasks) engine.complete(std::make_shared<Kept>(engine, after), Status());
  engine.release(std::move(lock), nullptr);
  EXPECT_TRUE(after_tasks[0] && after_tasks[1]);
}

TEST(Driving, ShutdownWaitsUntilWhatIsUnderWayHasLeft) {
  auto& network = ShuffledNetwork::only();
  network.orderly = true;
  auto process = std::move(Process::create(ShuffledTransport::open).value());
  auto other = std::move(ShuffledTransport::open().value());
  Groups ignored;
  ASSERT_TRUE(other->poll(ignored).ok());  // from now on it takes messages
  transport::Transport* transport = process->fabric().value();
  Engine::Lock lock = process->engine().lock();
  transport->post(transport->acquire(transport->add_peer(other->facts().address).value(), true), 1);
  lock.unlock();
  process->engine().shutdown();
  EXPECT_TRUE(network.flights.empty());
  network.orderly = false;
}

TEST(Driving, ShutdownEndsAWait) {
  run_world("AB", [&](RankContext& c) {
    if (c.rank == 1) return std::this_thread::sleep_for(milliseconds(300));
    std::vector<int> in(1000), out(2000);
    auto never = gather_of(in, out, c.ranks);
    c.group.submit(never, {}, true);
    std::thread ends([&] {
      std::this_thread::sleep_for(milliseconds(100));
      c.engine.shutdown();
    });
    // The group's own end is the status if the engine's last pass comes first.
    Status ended = c.engine.await(*never);
    EXPECT_TRUE(says(ended, "the process is ending") ||
                says(ended, "ended with operations in flight"));
    EXPECT_TRUE(c.engine.ended());
    ends.join();
  });
}

// A group whose passes are the test's, on an engine that sleeps at once if a pass finds nothing, or after that time.
class Stepping : private Progressable {
 public:
  explicit Stepping(const char* spin_microseconds = "0", transport::Open network = nullptr) {
    DebugSetting set("spin_microseconds", spin_microseconds);
    process = std::move(Process::create(std::move(network)).value());
    engine().attach(kKey, this);
  }
  ~Stepping() override { engine().detach(kKey); }
  Engine& engine() { return process->engine(); }
  void set_step(std::function<bool()> step) {
    Engine::Lock lock = engine().lock();
    step_ = std::move(step);
  }

  std::unique_ptr<Process> process;
  std::atomic<bool> works{true};
  std::atomic<int> passes{0}, watches{0};

 private:
  static constexpr JobKey kKey{1};
  bool busy() const override { return works; }
  bool progress() override {
    ++passes;
    return step_();
  }
  bool watch(uint64_t) override {
    ++watches;
    return false;
  }
  uint64_t deadline_ns() const override { return UINT64_MAX; }
  bool on_message(const wire::Header&, const std::byte*) override { return true; }
  void on_peer_lost(transport::Peer, const Status&) override {}
  void on_fabric_failed(const Status&) override {}
  bool needs_network() const override { return false; }
  void on_network_closed() override {}
  void fail(Status) noexcept override {}
  void leave() override {}
  std::function<bool()> step_ = [] { return false; };  // under the lock
};

// One sleep that no event ends lasts 100 ms: so many of them can't be overlooked, and so many that an event
// ends take no time.
void expect_short_rounds(const std::function<void()>& round) {
  uint64_t began = now_ns();
  for (int i = 0; i < 20; ++i) round();
  EXPECT_LT(now_ns() - began, 1'000'000'000u);
}

// Until that thread sleeps: /proc says so.
void await_sleep(const std::atomic<pid_t>& tid) {
  for (char state = 0; state != 'S'; sched_yield()) {
    std::ifstream file("/proc/self/task/" + std::to_string(tid) + "/stat");
    std::string line;
    std::getline(file, line);
    size_t end = line.rfind(") ");
    if (end != std::string::npos) state = line[end + 2];
  }
}

TEST(Start, WithoutADescriptorIsAnError) {
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit none{0, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  auto process = Process::create();
  setrlimit(RLIMIT_NOFILE, &before);
  ASSERT_FALSE(process.ok());
  EXPECT_TRUE(says(process.status(), "Too many open files"));
}

TEST(Sleep, BeginsAfterASecondLook) {
  Stepping group;
  expect_short_rounds([&] {
    auto task = std::make_shared<Operation>();
    int before = group.passes;
    // Nothing is there for the polls of wait(): one on its own, and one before the sleep. By value: the
    // background thread may still make a pass of this round when the next one begins.
    group.set_step([&group, task, before] {
      if (group.passes - before < 3) return false;
      group.engine().complete(task, Status());
      return true;
    });
    group.engine().wait(*task);
  });
  group.works = false;
}

// How many looks in vain follow one another without a sleep, at most, while something moves now and then and no
// thread waits. A group is asked to watch before each sleep.
int most_looks_before_a_sleep(Stepping& group, int looks) {
  int before = 0, most = 0, watches = 0;  // under the lock
  std::atomic<int> looked{0};
  group.set_step([&] {
    bool moves = ++looked % 10 == 0;
    if (moves || std::exchange(watches, group.watches) != group.watches) before = 0;
    if (!moves) most = std::max(most, ++before);
    return moves;
  });
  group.engine().release(group.engine().lock(), nullptr);  // to the background thread
  while (looked < looks) std::this_thread::sleep_for(milliseconds(1));
  group.works = false;
  group.set_step([] { return false; });
  return most;
}

// One look, and one that begins the sleep.
TEST(Sleep, OfTheBackgroundThreadBeginsAtOnceWhereTheNetworkHasAWaitObject) {
  Stepping group("200");
  Variable provider("SMDDP_FABRIC_PROVIDER", "tcp");
  auto endpoint = group.process->fabric();
  ASSERT_TRUE(endpoint.ok()) << endpoint.status().message();
  ASSERT_GE(endpoint.value()->wait_fd(), 0);
  EXPECT_EQ(most_looks_before_a_sleep(group, 20), 2);
}

// Even if another program computes on the core, so that each yield takes long, one look more.
TEST(Sleep, OfTheBackgroundThreadComesAfterFurtherLooksWhereTheNetworkHasNoWaitObject) {
  Stepping group("200", ShuffledTransport::open);
  ASSERT_TRUE(group.process->fabric().ok());
  EXPECT_GE(most_looks_before_a_sleep(group, 2000), 3);
}

// No event tells of data where the provider has no wait object. Once a millisecond would bound what an
// operation moves that no thread waits for. Other processes may hold up any look, but not each of two hundred.
TEST(Sleep, IsShortWhereTheNetworkHasNoWaitObject) {
  Stepping group("0", ShuffledTransport::open);
  ASSERT_TRUE(group.process->fabric().ok());
  std::vector<uint64_t> looks;  // under the lock
  group.set_step([&] {
    looks.push_back(now_ns());
    return looks.size() % 10 == 0;  // something moves now and then
  });
  group.engine().release(group.engine().lock(), nullptr);  // to the background thread
  for (bool enough = false; !enough; std::this_thread::sleep_for(milliseconds(1))) {
    Engine::Lock lock = group.engine().lock();
    enough = looks.size() >= 2000;
  }
  group.works = false;
  Engine::Lock lock = group.engine().lock();
  // With a sleep of a millisecond, ten looks take at least three: a sleep comes after two of them.
  uint64_t shortest = UINT64_MAX;
  for (size_t i = 10; i < looks.size(); ++i)
    shortest = std::min(shortest, looks[i] - looks[i - 10]);
  EXPECT_LT(shortest, 3'000'000u);
}

// A thread that drives and sleeps, as it waits for an operation whose end does not come by itself. Passes finish `next`.
class SleepingDriver {
 public:
  SleepingDriver() {
    group.set_step([this] {
      if (next) group.engine().complete(std::exchange(next, nullptr), Status());
      return false;
    });
    thread_ = std::thread([this] {
      tid_ = gettid();
      group.engine().wait(*driven_);
    });
    while (group.passes == 0) sched_yield();
  }
  ~SleepingDriver() {
    group.works = false;
    Engine::Lock lock = group.engine().lock();
    group.engine().complete(driven_, Status());
    group.engine().release(std::move(lock), nullptr);
    thread_.join();
  }
  void await_sleep() { smddp::await_sleep(tid_); }

  Stepping group;
  std::shared_ptr<Operation> next;  // under the lock

 private:
  const std::shared_ptr<Operation> driven_ = std::make_shared<Operation>();
  std::atomic<pid_t> tid_{0};
  std::thread thread_;
};

TEST(Sleep, EndsWhenAnotherThreadBeginsToWait) {
  SleepingDriver driver;
  expect_short_rounds([&] {
    driver.await_sleep();
    auto task = std::make_shared<Operation>();
    {
      Engine::Lock lock = driver.group.engine().lock();
      driver.next = task;
    }
    driver.group.engine().wait(*task);
  });
}

TEST(Sleep, EndsForWorkThatNoThreadWaitsFor) {
  SleepingDriver driver;
  expect_short_rounds([&] {
    driver.await_sleep();
    auto task = std::make_shared<Operation>();
    Engine::Lock lock = driver.group.engine().lock();
    driver.next = task;
    driver.group.engine().release(std::move(lock), nullptr);
    while (!task->complete()) usleep(100);
  });
}

// Soon after another such task, and long after it.
TEST(Driving, BeginsSoonForATaskThatACallerMayWaitFor) {
  Stepping group;
  for (int pause_ms : {0, 0, 50, 0, 50}) {
    group.works = false;
    std::this_thread::sleep_for(milliseconds(pause_ms));
    auto task = std::make_shared<Operation>();
    group.set_step([&] {
      group.engine().complete(task, Status());
      group.works = false;
      return true;
    });
    Engine::Lock lock = group.engine().lock();
    group.works = true;
    group.engine().release(std::move(lock), nullptr, true);
    for (uint64_t until = now_ns() + 5'000'000'000; !task->complete() && now_ns() < until;)
      usleep(100);
    ASSERT_TRUE(task->complete()) << "after " << pause_ms << " ms";
  }
  group.set_step([] { return false; });
}

TEST(Sleep, EndsWhenAnotherThreadEndsTheTask) {
  Stepping group;
  group.works = false;
  expect_short_rounds([&] {
    auto task = std::make_shared<Operation>();
    std::atomic<pid_t> tid{0};
    std::thread driver([&] {
      tid = gettid();
      group.engine().wait(*task);
    });
    await_sleep(tid);
    Engine::Lock lock = group.engine().lock();
    group.engine().complete(task, Status());
    group.engine().release(std::move(lock), nullptr);
    driver.join();
  });
}

// An operation of several fragments may meet its end several times.
TEST(Tasks, EndOnceWithTheFirstStatus) {
  struct Counted : Operation {
    void on_complete() override { ++ends; }
    int ends = 0;
  };
  Stepping group;
  group.works = false;
  auto task = std::make_shared<Counted>(), other = std::make_shared<Counted>();
  for (int turn = 0; turn < 2; ++turn) {
    Engine::Lock lock = group.engine().lock();
    for (const Status& status : {Status(), Status(Code::kAborted, "later")}) {
      group.engine().complete(task, status);
      group.engine().complete(other, status);
    }
    group.engine().release(std::move(lock), nullptr);
  }
  for (const auto& each : {task, other}) {
    EXPECT_TRUE(each->complete() && each->status().ok());
    EXPECT_EQ(each->ends, 1);
  }
}

TEST(Driving, PassesToAnotherThreadThatWaitsIfTheDriverStopsWaiting) {
  Stepping group;
  bool left = false;  // under the lock
  std::shared_ptr<Operation> never, task;
  group.set_step([&] {
    if (left) group.engine().complete(task, Status());
    return false;
  });
  // Sometimes the driver has changed before it leaves.
  for (int round = 0; round < 5; ++round) {
    {
      Engine::Lock lock = group.engine().lock();
      left = false;
      never = std::make_shared<Operation>();
      task = std::make_shared<Operation>();
    }
    int before = group.passes;
    std::thread first([&] {
      EXPECT_FALSE(group.engine().wait(*never, milliseconds(200)));
      Engine::Lock lock = group.engine().lock();
      left = true;
    });
    while (group.passes == before) sched_yield();
    EXPECT_TRUE(group.engine().wait(*task, std::chrono::seconds(3)));
    first.join();
  }
  group.works = false;
}

}  // namespace
}  // namespace smddp
