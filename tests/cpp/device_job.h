// Makes collectives of floats on device memory, as the torch module does, for tests.
#pragma once

#include "device_world.h"
#include "gpu/device_plan.h"

namespace smddp {

inline std::byte* bytes(float* p) { return reinterpret_cast<std::byte*>(p); }

// Small integers, whose sums are exact in any order.
inline float value(int rank, size_t i, int turn) {
  return static_cast<float>(rank * 1000 + turn * 7) + static_cast<float>(i % 97);
}

struct Job {
  DeviceRank& r;
  DevicePlace place;
  std::vector<std::byte*> temporaries;
  std::shared_ptr<DeviceOperation> last;  // AllGather

  explicit Job(DeviceRank& rank, bool on_cpu = false)
      : r(rank),
        place{rank.context.group.topology(),
              rank.context.rank,
              on_cpu,
              rank.group && rank.group->by_nic(),
              rank.group && rank.group->kernels(),
              {}} {}

  std::shared_ptr<DeviceOperation> begin(Collective collective, ReduceOp op, size_t count) {
    bool sums = op != ReduceOp::kNone;
    if (device_way(place, sums) == DeviceWay::kAll) {
      Status opened = r.group->open_for_all(r.context.group, r.context.store);
      EXPECT_TRUE(opened.ok()) << opened.message();
    }
    auto made = std::make_shared<DeviceOperation>();
    made->what.collective = collective;
    made->what.bytes = count * 4;
    made->what.dtype = sums ? Dtype::kFloat32 : Dtype::kBytes;
    made->what.reduce_op = op;
    made->what.segments = 1;
    made->what.digest = count;
    made->plan.dtype = made->what.dtype;
    made->plan.op = op;
    made->plan.divisor = op == ReduceOp::kAvg ? r.context.ranks : 1;
    made->plan.blocks = 2;
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
    plan_scatter(*op, place, {{bytes(in), ranks * count * 4}}, blocks, {{bytes(out), count * 4}},
                 [&](size_t size) {
                   auto* memory = static_cast<std::byte*>(r.gpu.allocate(size).value());
                   temporaries.push_back(memory);
                   return memory;
                 });
    return op;
  }
  std::shared_ptr<DeviceOperation> reduce(float* data, size_t count,
                                          ReduceOp reduce = ReduceOp::kSum) {
    auto op = begin(Collective::kAllReduce, reduce, count);
    plan_reduce(*op, place, {{bytes(data), count * 4}});
    return op;
  }
};

}  // namespace smddp
