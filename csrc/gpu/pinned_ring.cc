#include "gpu/pinned_ring.h"

#include <utility>

namespace smddp {

Result<std::shared_ptr<PinnedRing>> PinnedRing::create(device::Device& device, size_t buffer_bytes,
                                                       bool on_device) {
  auto ring = std::make_shared<PinnedRing>(device, buffer_bytes, on_device);
  if (Status s = Mapping::map(ring->bytes(), MAP_SHARED).into(ring->host_); !s) return s;
  if (Status s = device.map_host(ring->host_.data(), ring->bytes()).into(ring->device_address_); !s)
    return s;
  if (on_device) {
    if (Status s = device.allocate(ring->all_buffers()).into(ring->on_device_); !s) return s;
  }
  if (Status s = device.create_flags().into(ring->arrived_); !s) return s;
  for (device::Event& event : ring->copied_in_) {
    if (Status s = device.create_event().into(event); !s) return s;
  }
  return ring;
}

PinnedRing::~PinnedRing() {
  for (device::Event event : copied_in_) device_.destroy_event(event);
  if (on_device_ != nullptr) device_.free(on_device_);
  if (device_address_ != nullptr) device_.unmap_host(host_.data());
}

}  // namespace smddp
