// Ranks as threads, each with a device of its own.
#pragma once

#include "device/host_device.h"
#include "gpu_collectives/device_group.h"
#include "world.h"

namespace smddp {

// One rank's side, on a device that nobody else of this process uses.
struct GroupRank {
  GroupRank(RankContext& rank, device::Device& its, double limit_seconds = 60)
      : context(rank), device(its), imports(its), main(its.create_stream().value()) {
    user = its.create_stream().value();
    auto made = DeviceGroup::create(rank.engine, rank.group, rank.store, Status(), &its, &imports,
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
    Status s = group->order(op, user, {});
    if (s) s = device.synchronize(user);
    return s;
  }
  Status run(const std::shared_ptr<DeviceOperation>& op) {
    Status s = group->submit(op, user);
    return s ? wait(*op) : s;
  }

  RankContext& context;
  device::Device& device;
  intranode::Imports imports;
  device::Stream main, user;
  std::shared_ptr<DeviceGroup> group;
};

struct Played {
  device::HostDevice gpu;
};
// One that threads play, as if the rank were a process of its own.
struct DeviceRank : Played, GroupRank {
  explicit DeviceRank(RankContext& rank, double limit_seconds = 60)
      : GroupRank(rank, gpu, limit_seconds) {}
  float* floats(size_t count) { return static_cast<float*>(gpu.allocate(count * 4).value()); }
};

}  // namespace smddp
