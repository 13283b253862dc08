// Ranks as threads, each with a device of its own that threads play.
#pragma once

#include "collectives/device_group.h"
#include "device/host_device.h"
#include "world.h"

namespace smddp {

// One rank's side: a device of its own, as if it were a process of its own.
struct DeviceRank {
  explicit DeviceRank(RankContext& rank, double limit_seconds = 60)
      : context(rank), imports(gpu), main(gpu.create_stream().value()) {
    user = gpu.create_stream().value();
    auto made = DeviceGroup::create(rank.engine, rank.group, rank.store, Status(), &gpu, &imports,
                                    main, static_cast<uint64_t>(limit_seconds * 1e9));
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (made) group = made.value();
  }
  ~DeviceRank() {
    if (group) group->leave();
    group.reset();
    gpu.destroy_stream(user);
    gpu.destroy_stream(main);
  }

  float* floats(size_t count) { return static_cast<float*>(gpu.allocate(count * 4).value()); }
  Status wait(DeviceOperation& op) {
    Status s = group->order(op, user, {});
    if (s) s = gpu.synchronize(user);
    return s;
  }
  Status run(const std::shared_ptr<DeviceOperation>& op) {
    Status s = group->submit(op, user);
    return s ? wait(*op) : s;
  }

  RankContext& context;
  device::HostDevice gpu;
  intranode::Imports imports;
  device::Stream main, user;
  std::shared_ptr<DeviceGroup> group;
};

}  // namespace smddp
