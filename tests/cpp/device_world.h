// A world of ranks for the tests of collectives on device memory: each rank is a thread and has a device of
// its own.
#pragma once

#include <chrono>
#include <thread>

#include "device/host_device.h"
#include "gpu/device_group.h"
#include "world.h"

namespace smddp {

// One rank's part of a device group. No other rank of this process uses its device.
struct GroupRank {
  GroupRank(RankContext& rank, device::Device& its, double limit_seconds = 60)
      : context(rank), device(its), imports(its), main(its.create_stream().value()) {
    user = its.create_stream().value();
    auto made = DeviceGroup::create(rank.process, rank.group, rank.store, Status(), &its, &imports,
                                    main, static_cast<uint64_t>(limit_seconds * 1e9));
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (made) group = made.value();
  }
  ~GroupRank() {
    if (group) group->leave();
    group.reset();
    device.destroy_stream(user);
    device.destroy_stream(main);
  }

  Status wait(DeviceOperation& op) {
    Status s = group->order(op, user);
    if (s) s = device.synchronize(user);
    return s;
  }
  // wait(), and whether what has come is the result.
  Status finish(DeviceOperation& op) {
    Status s = wait(op);
    return s ? group->verdict(op) : s;
  }
  Status run(const std::shared_ptr<DeviceOperation>& op) {
    Status s = group->submit(op, user);
    return s ? wait(*op) : s;
  }

  // The group's error, or ok if the group has not failed within 20 s.
  Status failure() {
    auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (group->status().ok() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return group->status();
  }

  RankContext& context;
  device::Device& device;
  intranode::Imports imports;
  device::Stream main, user;
  std::shared_ptr<DeviceGroup> group;
};

inline testing::AssertionResult works(const Status& s) {
  return s ? testing::AssertionSuccess() : testing::AssertionFailure() << s.message();
}

// `s` is an error that has `words`, and no stream of the rank still waits.
inline void expect_ended(GroupRank& r, const Status& s, const std::vector<std::string>& words) {
  ASSERT_FALSE(s.ok());
  for (const std::string& word : words)
    EXPECT_NE(s.message().find(word), std::string::npos) << word << " in: " << s.message();
  EXPECT_TRUE(r.device.synchronize(r.main).ok());
}

// Where the ranks of a test meet once; a rank whose test has failed does not come, and the others go on after
// a minute.
class Meeting {
 public:
  explicit Meeting(int ranks) : missing_(ranks) {}
  void come() {
    --missing_;
    auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (missing_ > 0 && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  std::atomic<int> missing_;
};

struct SimulatedDevice {
  device::HostDevice gpu;
};
// A rank on a simulated device of its own, as if the rank were a process.
struct DeviceRank : SimulatedDevice, GroupRank {
  explicit DeviceRank(RankContext& rank, double limit_seconds = 60)
      : GroupRank(rank, gpu, limit_seconds) {}
  ~DeviceRank() { EXPECT_EQ(gpu.freed_while_mapped(), 0u); }
  float* floats(size_t count) { return static_cast<float*>(gpu.allocate(count * 4).value()); }
};

// run_world(), with a device of its own for each rank; a Job makes the rank's operations.
template <class Job>
void run_jobs(const std::string& layout, const std::function<void(DeviceRank&, Job&)>& body) {
  run_world(layout, [&](RankContext& context) {
    DeviceRank r(context);
    ASSERT_TRUE(r.group);
    Job job(r);
    body(r, job);
  });
}

}  // namespace smddp
