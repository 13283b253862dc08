// The device to which a process group is bound: chosen by the first call for tensors on a device, which is a call of
// all ranks. Used by ProcessGroupSMDDP alone.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "torch/device_collectives.h"
#include "torch/runtime.h"

namespace smddp {

class BoundDevice {
 public:
  BoundDevice(std::shared_ptr<Process> process, Store& store)
      : process_(std::move(process)), store_(store) {}

  // Who carries out collectives on these tensors; nullptr if they lie on no device, or if the group
  // has none: refusal() then says why. The first call for tensors on a device makes the device group of
  // `group`. Throws if the tensors lie on another device than those of the first call.
  DeviceCollectives* of(TensorRefs tensors, Group& group, std::chrono::milliseconds timeout) {
    std::lock_guard making(making_);
    if (!std::exchange(tried_, true)) {
      keep_process(process_);
      auto made =
          DeviceCollectives::create(*process_, group, store_, TorchDevice::of(tensors), timeout);
      if (made) {
        std::lock_guard lock(mutex_);
        collectives_ = std::move(made.value());
      } else {
        refusal_ = "smddp can't carry this group's GPU tensors: " + made.status().message();
      }
    }
    auto collectives = existing();
    if (collectives) {
      auto device = TorchDevice::of(tensors);
      require(device.ok() && device.value() == &collectives->device(),
              "a group carries tensors of one GPU per rank; this one began with another GPU");
    }
    return collectives.get();
  }
  // Why tensors on a device go to the fallback.
  const char* refusal() const {
    return refusal_.empty() ? "SMDDP_DEVICE is off" : refusal_.c_str();
  }

  // nullptr until of() has made it, and after release(). Any thread may call it at any time.
  std::shared_ptr<DeviceCollectives> existing() const {
    std::lock_guard lock(mutex_);
    return collectives_;
  }
  void release() {
    std::shared_ptr<DeviceCollectives> released;  // destroyed after the lock
    std::lock_guard lock(mutex_);
    released.swap(collectives_);
  }

 private:
  const std::shared_ptr<Process> process_;
  Store& store_;
  std::mutex making_;  // held while the ranks make the device group
  bool tried_ = false;
  std::string refusal_;
  mutable std::mutex mutex_;
  std::shared_ptr<DeviceCollectives> collectives_;  // changes under mutex_
};

}  // namespace smddp
