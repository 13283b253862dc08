#include "torch/bound_device.h"

#include <utility>

namespace smddp {

DeviceCollectives* BoundDevice::of(TensorRefs tensors, Group& group,
                                   std::chrono::milliseconds timeout) {
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

}  // namespace smddp
