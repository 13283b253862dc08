// Sums of groups with one rank on each host: the ranks exchange blocks through pinned memory, and each device
// sums its own, on the device that threads simulate.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "device_job.h"
#include "kernels/reduce.h"

namespace smddp {
namespace {

// --- the plan

std::string hosts(size_t count) {
  std::string names;
  for (size_t i = 0; i < count; ++i) names.push_back(static_cast<char>(i + 1));
  return names;
}

struct PlanCase {
  std::string hosts;
  bool on_cpu, kernels, fp32;
  const char* sums;
  const char* gathers;
};

TEST(DevicePlan, TheDeviceSumsWhatComesFromOtherHostsIfEachHasOneRank) {
  const char *pinned = "pinned + fabric", *device = "pinned + fabric + gpu-kernel";
  for (const PlanCase& c : {
           PlanCase{"ab", false, true, false, device, pinned},
           PlanCase{"abcde", false, true, false, device, pinned},
           // No partial sum travels.
           PlanCase{"ab", false, true, true, device, pinned},
           PlanCase{"ab", true, true, false, pinned, pinned},
           PlanCase{"ab", false, false, false, pinned, pinned},
           PlanCase{"a", false, true, false, "gpu-kernel", "copy-engine"},
           PlanCase{"aabb", false, true, false, "gpu-kernel + fabric", "copy-engine + fabric"},
           PlanCase{"aabb", false, true, true, pinned, "copy-engine + fabric"},
           PlanCase{"aab", false, true, false, pinned, pinned},
           PlanCase{hosts(kernels::kMostSources), false, true, false, device, pinned},
           PlanCase{hosts(kernels::kMostSources + 1), false, true, false, pinned, pinned},
       }) {
    std::vector<std::string> names;
    for (char host : c.hosts) names.emplace_back(1, host);
    Topology topology(names);
    DevicePlace place{topology, 0, c.on_cpu, false, c.kernels, {}};
    place.tuning.reduce_precision_fp32 = c.fp32;
    EXPECT_STREQ(name_of_way(place, true), c.sums) << c.hosts.size() << " ranks";
    EXPECT_STREQ(name_of_way(place, false), c.gathers) << c.hosts.size() << " ranks";
    EXPECT_EQ(device_sums_hosts(place), c.sums == device);
    bool alone = topology.nodes() > 1 && topology.ranks() == topology.nodes();
    if (alone) EXPECT_EQ(device_way(place, true), DeviceWay::kRails);  // no other group is opened
  }
}

// --- results

struct Sum {
  Dtype dtype;
  ReduceOp op;
  std::vector<size_t> counts;  // elements of each tensor: of a block, or of an AllReduce's tensor
  size_t off = 0;              // elements before the first tensor
  size_t all() const {
    size_t sum = 0;
    for (size_t count : counts) sum += count;
    return sum;
  }
};

std::byte* memory(GroupRank& r, size_t elements, Dtype dtype) {
  return static_cast<std::byte*>(r.device.allocate(elements * size_of(dtype)).value());
}

// Bits that differ by rank and turn: numbers whose sums round, and any integers.
void fill(std::byte* to, size_t elements, Dtype dtype, uint64_t seed) {
  size_t element = size_of(dtype);
  uint64_t bits = seed * 2 + 1;
  for (size_t i = 0; i < elements; ++i) {
    bits = extend_digest(bits, i);
    uint64_t whole = bits;
    auto number = static_cast<float>(static_cast<int32_t>(bits >> 32)) * 0x1p-30f;
    if (dtype == Dtype::kFloat32 || dtype == Dtype::kBFloat16) {
      uint32_t single = 0;
      std::memcpy(&single, &number, 4);
      whole = dtype == Dtype::kFloat32 ? single : single >> 16;
    }
    std::memcpy(to + i * element, &whole, element);
  }
}

std::shared_ptr<DeviceOperation> begin(Job& job, Collective collective, const Sum& sum) {
  job.place.tuning.algorithm = Algorithm::kDirect;
  auto op = job.begin(collective, sum.op, sum.all(), sum.dtype);
  op->what.segments = static_cast<uint32_t>(sum.counts.size());
  return op;
}

// `in`: rank by rank, and in each rank's part tensor by tensor.
std::shared_ptr<DeviceOperation> scatter(Job& job, const Sum& sum, std::byte* in, std::byte* out) {
  auto op = begin(job, Collective::kReduceScatter, sum);
  size_t element = size_of(sum.dtype), at = 0;
  std::vector<Extent> outputs;
  std::vector<DevicePart> blocks;
  for (size_t count : sum.counts) {
    for (int p = 0; p < job.r.context.ranks; ++p) {
      size_t offset = (static_cast<size_t>(p) * sum.all() + at) * element;
      blocks.push_back({0, offset, count * element, in + offset});
    }
    outputs.push_back({out + at * element, count * element});
    at += count;
  }
  plan_scatter(*op, job.place, {}, blocks, outputs, [](size_t) { return nullptr; });
  return op;
}

std::shared_ptr<DeviceOperation> reduce(Job& job, const Sum& sum, std::byte* data) {
  auto op = begin(job, Collective::kAllReduce, sum);
  std::vector<Extent> tensors;
  for (size_t count : sum.counts) {
    tensors.push_back({data, count * size_of(sum.dtype)});
    data += count * size_of(sum.dtype);
  }
  plan_reduce(*op, job.place, tensors);
  return op;
}

// One operation with its memory and what its result must be: a reduction of all ranks' inputs in their order, in
// fp32 for half types, rounded once. That is what the ranks of one host get.
struct CheckedSum {
  std::shared_ptr<DeviceOperation> op;
  std::byte* result;
  std::vector<std::byte> expected;

  static CheckedSum make(GroupRank& r, Job& job, const Sum& sum, bool scatters, bool in_place,
                         uint64_t turn) {
    auto ranks = static_cast<size_t>(r.context.ranks), mine = static_cast<size_t>(r.context.rank);
    size_t element = size_of(sum.dtype), all = sum.all(), whole = scatters ? all * ranks : all;
    std::byte* in = memory(r, whole + sum.off, sum.dtype) + sum.off * element;
    fill(in, whole, sum.dtype, turn * ranks + mine);
    std::vector<std::vector<std::byte>> inputs(ranks, std::vector<std::byte>(whole * element));
    std::vector<const void*> sources;
    for (size_t p = 0; p < ranks; ++p) {
      fill(inputs[p].data(), whole, sum.dtype, turn * ranks + p);
      sources.push_back(inputs[p].data() + (scatters ? mine * all * element : 0));
    }
    CheckedSum made;
    made.expected.resize(all * element);
    kernels::reduce(made.expected.data(), sources.data(), ranks, all, sum.dtype, sum.op,
                    sum.op == ReduceOp::kAvg ? static_cast<int>(ranks) : 1);
    made.result = !scatters ? in : in_place ? in + mine * all * element : memory(r, all, sum.dtype);
    made.op = scatters ? scatter(job, sum, in, made.result) : reduce(job, sum, in);
    return made;
  }
  void check(GroupRank& r) {
    ASSERT_TRUE(works(r.finish(*op)));
    auto wrong = std::mismatch(expected.begin(), expected.end(), result).first;
    ASSERT_TRUE(wrong == expected.end())
        << "byte " << wrong - expected.begin() << " of " << expected.size();
  }
};

void submit(GroupRank& r, const CheckedSum& each) {
  ASSERT_TRUE(works(r.group->submit(each.op, r.user)));
}

constexpr Dtype kTypes[] = {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kInt64, Dtype::kUInt8};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax};

Sum random_sum(std::mt19937& random) {
  Sum sum;
  sum.dtype = kTypes[random() % std::size(kTypes)];
  sum.op = kOps[random() % std::size(kOps)];
  sum.off = random() % 9;
  size_t tensors = 1 + random() % 4;
  for (size_t t = 0; t < tensors; ++t) {
    size_t most = random() % 4 == 0 ? 300'000 : 3000;
    sum.counts.push_back(random() % 8 == 0 ? 0 : random() % most);
  }
  return sum;
}

class DeviceHostSums : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Hosts, DeviceHostSums, testing::Values("ab", "abc", "abcd", "abcde"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(DeviceHostSums, EqualSumsInRankOrderAndThoseOfTheCpu) {
  run_world(GetParam(), [](RankContext& context) {
    DeviceRank r(context);
    ASSERT_TRUE(r.group);
    Job job(r), on_cpu(r, true);
    ASSERT_STREQ(name_of_way(job.place, true), "pinned + fabric + gpu-kernel");
    std::mt19937 random(static_cast<unsigned>(context.ranks));  // the same on all ranks
    for (uint64_t turn = 0; turn < 24; ++turn) {
      Sum sum = random_sum(random);
      bool scatters = turn % 3 != 0, in_place = turn % 3 == 1;
      size_t before = r.gpu.sums();
      CheckedSum by_device = CheckedSum::make(r, job, sum, scatters, in_place, turn);
      submit(r, by_device);
      by_device.check(r);
      bool any = scatters ? sum.all() > 0 : by_device.op->exchanges.front().in.bytes(0) > 0;
      EXPECT_EQ(r.gpu.sums() > before, any);
      before = r.gpu.sums();
      CheckedSum by_cpu = CheckedSum::make(r, on_cpu, sum, scatters, in_place, turn);
      submit(r, by_cpu);
      by_cpu.check(r);
      EXPECT_EQ(r.gpu.sums(), before);
      if (testing::Test::HasFatalFailure()) return;
    }
  });
}

// More chunks than buffers, several operations in flight, and copies and sums that take time: what no stream
// orders shows as wrong bytes.
TEST_P(DeviceHostSums, OperationsOfManyChunksInFlight) {
  run_jobs(GetParam(), [](DeviceRank& r, Job& job) {
    r.gpu.set_duration(std::chrono::microseconds(300));
    Sum large{Dtype::kBFloat16, ReduceOp::kAvg, {2'000'001, 5, 500'000}, 1};
    Sum small{Dtype::kFloat32, ReduceOp::kSum, {100}};
    std::vector<CheckedSum> all;
    for (uint64_t turn = 0; turn < 6; ++turn)
      all.push_back(CheckedSum::make(r, job, turn % 2 == 0 ? large : small, turn == 0, true, turn));
    for (const CheckedSum& each : all) submit(r, each);
    for (CheckedSum& each : all) each.check(r);
  });
}

// Chunks arrive faster than they are summed. Their blocks are not overwritten before.
TEST(DeviceHostSums, SlowSumsOfManyChunks) {
  run_jobs("ab", [](DeviceRank& r, Job& job) {
    r.gpu.set_sum_duration(std::chrono::milliseconds(20));
    Sum large{Dtype::kFloat32, ReduceOp::kSum, {5'000'000}};  // ten chunks
    CheckedSum each = CheckedSum::make(r, job, large, true, false, 1);
    submit(r, each);
    each.check(r);
  });
}

// More commands than a stream takes, copies out and sums.
TEST(DeviceHostSums, AnOperationWithMoreCommandsThanStreamsTake) {
  run_jobs("abc", [](DeviceRank& r, Job& job) {
    Sum sum{Dtype::kFloat32, ReduceOp::kSum, std::vector<size_t>(200, 1001)};
    CheckedSum scattered = CheckedSum::make(r, job, sum, true, false, 1);
    CheckedSum reduced = CheckedSum::make(r, job, sum, false, true, 2);
    submit(r, scattered);
    submit(r, reduced);
    scattered.check(r);
    reduced.check(r);
  });
}

// The last chunk leaves only once the first is summed.
TEST(DeviceHostSums, ADeviceSumsWhileChunksAreOnTheirWay) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::atomic<bool> expired{false};
  run_jobs("ab", [&](DeviceRank& r, Job& job) {
    constexpr size_t kCount = 2 << 20;  // floats: four chunks
    CheckedSum sum =
        CheckedSum::make(r, job, {Dtype::kFloat32, ReduceOp::kSum, {kCount}}, true, false, 1);
    std::byte* other =
        sum.op->exchanges.front().out.slice(1 - r.context.rank, 0, 1).front().address;
    r.gpu.set_gate([=, &expired, &r, before = r.gpu.sums()](const void*, const void* from) {
      if (from != other + kCount * 3 || r.gpu.sums() > before) return true;
      if (std::chrono::steady_clock::now() > until) expired = true;
      return expired.load();
    });
    submit(r, sum);
    sum.check(r);
  });
  EXPECT_FALSE(expired);
}

// --- disagreements and failures

TEST(DeviceHostSums, OneDeviceWithoutKernelsLeavesTheSumsToAllRanksCpus) {
  run_world("abc", [](RankContext& context) {
    device::HostDevice gpu;
    gpu.set_kernels(context.rank != 1);
    GroupRank r(context, gpu);
    ASSERT_TRUE(r.group);
    EXPECT_FALSE(r.group->kernels());
    Job job(r);
    Sum sum{Dtype::kBFloat16, ReduceOp::kSum, {10'001}};
    CheckedSum each = CheckedSum::make(r, job, sum, true, false, 1);
    submit(r, each);
    each.check(r);
    EXPECT_EQ(gpu.sums(), 0u);
  });
  run_world("aab", [](RankContext& context) {
    device::HostDevice gpu;
    gpu.set_kernels(context.rank != 1);
    GroupRank r(context, gpu, 4);
    ASSERT_TRUE(r.group);
    EXPECT_FALSE(r.group->kernels());
    EXPECT_EQ(gpu.sums(), 0u);
  });
}

TEST(DeviceHostSums, RanksWithDifferentSettingsFail) {
  run_world("ab", [](RankContext& context) {
    DeviceRank r(context);
    Job job(r, context.rank == 0);
    Sum sum{Dtype::kFloat32, ReduceOp::kSum, {64}};
    CheckedSum each = CheckedSum::make(r, job, sum, true, false, 1);
    expect_failure(r, each.op, {"summed by devices", "reduce_scatter"});
  });
}

}  // namespace
}  // namespace smddp
