// The device to which a process group is bound: chosen by the first call for tensors on a device, which is a call of
// all ranks. Used by ProcessGroupSMDDP alone.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "torch/device_collectives.h"

namespace smddp {

class BoundDevice {
 public:
  BoundDevice(Process& process, Store& store) : process_(process), store_(store) {}

  // Who carries out collectives on these tensors; nullptr if they lie on no device, or if the group
  // has none: refusal() then says why. The first call for tensors on a device makes the device group of
  // `group`. Throws if the tensors lie on another device than those of the first call.
  DeviceCollectives* of(TensorRefs tensors, Group& group, std::chrono::milliseconds timeout) {
    std::lock_guard lock(mutex_);
    if (!std::exchange(tried_, true)) {
      auto made =
          DeviceCollectives::create(process_, group, store_, TorchDevice::of(tensors), timeout);
      if (made) {
        collectives_ = std::move(made.value());
      } else {
        refusal_ = "smddp can't carry this group's GPU tensors: " + made.status().message();
      }
    }
    if (collectives_) {
      auto device = TorchDevice::of(tensors);
      require(device.ok() && device.value() == &collectives_->device(),
              "a group carries tensors of one GPU per rank; this one began with another GPU");
    }
    return collectives_.get();
  }
  // Why tensors on a device go to the fallback.
  const char* refusal() const {
    return refusal_.empty() ? "SMDDP_DEVICE is off" : refusal_.c_str();
  }

  // nullptr until of() has made it.
  DeviceCollectives* existing() { return collectives_.get(); }
  void release() { collectives_.reset(); }

 private:
  Process& process_;
  Store& store_;
  std::mutex mutex_;
  bool tried_ = false;
  std::string refusal_;
  std::unique_ptr<DeviceCollectives> collectives_;
};

}  // namespace smddp
