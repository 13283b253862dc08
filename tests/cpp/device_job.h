// For the tests of collectives on device memory: ranks that are threads, each with a device of its own, and the
// collectives as the torch module makes them.
#pragma once

#include <chrono>
#include <thread>

#include "device/host_device.h"
#include "gpu/device_group.h"
#include "gpu/device_plan.h"
#include "world.h"

namespace smddp {

// One rank's part of a device group. No other rank of this process uses its device.
struct GroupRank {
  GroupRank(RankContext& rank, device::Device& its, double limit_seconds = 60,
            DeviceGroup::EndProcess end_process = {})
      : context(rank), device(its), imports(its), main(its.create_stream().value()) {
    user = its.create_stream().value();
    auto made = DeviceGroup::create(rank.process, rank.group, rank.store, Status(), &its, &imports,
                                    main, static_cast<uint64_t>(limit_seconds * 1e9), true,
                                    std::move(end_process));
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

  float* floats(size_t count) { return static_cast<float*>(device.allocate(count * 4).value()); }

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
  for (const std::string& word : words) EXPECT_TRUE(says(s, word));
  EXPECT_TRUE(r.device.synchronize(r.main).ok());
}

// Submits the operation, waits until it fails, and expects `words` in the error.
inline void expect_failure(GroupRank& r, const std::shared_ptr<DeviceOperation>& op,
                           const std::vector<std::string>& words) {
  Status s = r.run(op);
  if (s) s = r.failure();
  if (s) s = r.group->verdict(*op);
  expect_ended(r, s, words);
}

// A barrier that is used once: a rank whose test has failed does not arrive, and the others go on after a minute.
class RankBarrier {
 public:
  explicit RankBarrier(int ranks) : missing_(ranks) {}
  void arrive_and_wait() {
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
  explicit DeviceRank(RankContext& rank, double limit_seconds = 60,
                      DeviceGroup::EndProcess end_process = {},
                      size_t queues = device::HostDevice::kQueues)
      : SimulatedDevice{device::HostDevice(queues)},
        GroupRank(rank, gpu, limit_seconds, std::move(end_process)) {}
  ~DeviceRank() { EXPECT_EQ(gpu.freed_while_mapped(), 0u); }
};

inline std::byte* bytes(float* p) { return reinterpret_cast<std::byte*>(p); }

// Small integers, whose sums are exact in any order.
inline float value(int rank, size_t i, int turn) {
  return static_cast<float>(rank * 1000 + turn * 7) + static_cast<float>(i % 97);
}

struct JobOperation : DeviceOperation {
  std::atomic<bool> told_closed{false};
  void on_closed(const Status&) override { told_closed = true; }
};

struct Job {
  GroupRank& r;
  DevicePlace place;
  std::shared_ptr<DeviceOperation> last;  // AllGather

  explicit Job(GroupRank& rank, bool on_cpu = false)
      : r(rank),
        place{rank.context.group.topology(),
              rank.context.rank,
              on_cpu,
              rank.group && rank.group->by_nic(),
              rank.group && rank.group->kernels(),
              {}} {}

  std::shared_ptr<DeviceOperation> begin(Collective collective, ReduceOp op, size_t count,
                                         Dtype dtype = Dtype::kFloat32) {
    bool sums = op != ReduceOp::kNone;
    if (device_way(place, sums) == DeviceWay::kAll) {
      Status opened = r.group->open_for_all(r.context.group, r.context.store);
      EXPECT_TRUE(opened.ok()) << opened.message();
    }
    auto made = std::make_shared<JobOperation>();
    made->what.collective = collective;
    made->what.bytes = count * size_of(dtype);
    made->what.dtype = dtype;
    made->what.reduce_op = op;
    made->what.segments = 1;
    made->what.digest = count;
    made->plan.how.dtype = made->what.dtype;
    made->plan.how.op = op;
    made->plan.how.divisor = op == ReduceOp::kAvg ? r.context.ranks : 1;
    made->plan.how.blocks = 2;
    return made;
  }
  // Of tensors side by side, in each rank's block of `out` as well; one tensor if `counts` is empty.
  std::shared_ptr<DeviceOperation> gather(float* in, float* out, size_t count,
                                          std::vector<size_t> counts = {}) {
    auto op = begin(Collective::kAllGather, ReduceOp::kNone, count);
    if (counts.empty()) counts = {count};
    std::vector<Extent> inputs, blocks;
    size_t at = 0;
    for (size_t each : counts) {
      inputs.push_back({bytes(in + at), each * 4});
      for (int p = 0; p < r.context.ranks; ++p)
        blocks.push_back({bytes(out + static_cast<size_t>(p) * count + at), each * 4});
      at += each;
    }
    plan_gather(*op, place, inputs, blocks);
    return last = op;
  }
  std::shared_ptr<DeviceOperation> scatter(float* in, float* out, size_t count,
                                           ReduceOp reduce = ReduceOp::kSum) {
    auto op = begin(Collective::kReduceScatter, reduce, count);
    auto ranks = static_cast<size_t>(r.context.ranks);
    std::vector<DevicePart> blocks;
    for (size_t p = 0; p < ranks; ++p)
      blocks.push_back({0, p * count * 4, count * 4, bytes(in + p * count)});
    plan_scatter(
        *op, place, {{bytes(in), ranks * count * 4}}, blocks, {{bytes(out), count * 4}},
        [&](size_t size) { return static_cast<std::byte*>(r.device.allocate(size).value()); });
    return op;
  }
  std::shared_ptr<DeviceOperation> reduce(float* data, size_t count,
                                          ReduceOp reduce = ReduceOp::kSum) {
    auto op = begin(Collective::kAllReduce, reduce, count);
    plan_reduce(*op, place, {{bytes(data), count * 4}});
    return op;
  }
};

// One operation with memory of its own, and what its result must be.
struct Checked {
  Checked(Job& job, Collective collective, size_t count, int turn,
          ReduceOp reduce = ReduceOp::kSum) {
    auto n = static_cast<size_t>(job.r.context.ranks),
         mine = static_cast<size_t>(job.r.context.rank);
    float *in = job.r.floats(count * n), *out = job.r.floats(count * n);
    bool gathers = collective == Collective::kAllGather;
    bool scatters = collective == Collective::kReduceScatter;
    for (size_t i = 0; i < count * (scatters ? n : 1); ++i)
      in[i] = value(job.r.context.rank, i, turn);
    expected.resize(gathers ? n * count : count);
    for (size_t i = 0; i < expected.size(); ++i) {
      if (gathers) expected[i] = value(static_cast<int>(i / count), i % count, turn);
      for (size_t p = 0; p < n && !gathers; ++p)
        expected[i] += value(static_cast<int>(p), i + (scatters ? mine * count : 0), turn);
      if (!gathers && reduce == ReduceOp::kAvg) expected[i] /= static_cast<float>(n);
    }
    result = collective == Collective::kAllReduce ? in : out;
    op = gathers    ? job.gather(in, out, count)
         : scatters ? job.scatter(in, out, count, reduce)
                    : job.reduce(in, count, reduce);
  }
  void check(Job& job) const {
    ASSERT_TRUE(works(job.r.finish(*op)));
    for (size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(result[i], expected[i]) << i;
  }

  std::shared_ptr<DeviceOperation> op;
  float* result;
  std::vector<float> expected;
};

// run_world(), with a device of its own for each rank, and a Job that makes the rank's operations.
// `on_one_host`: as after a group of the whole job.
inline void run_jobs(const std::string& layout, const std::function<void(DeviceRank&, Job&)>& body,
                     bool on_one_host = false) {
  run_world(layout, [&](RankContext& context) {
    context.process.set_on_one_host(on_one_host);
    DeviceRank r(context);
    ASSERT_TRUE(r.group);
    Job job(r);
    body(r, job);
  });
}

}  // namespace smddp
