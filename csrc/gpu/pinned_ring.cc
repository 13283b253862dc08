#include "gpu/pinned_ring.h"

#include <sys/mman.h>

#include <string>
#include <utility>

namespace smddp {

Result<std::shared_ptr<PinnedRing>> PinnedRing::create(device::Device& device, size_t buffer_bytes,
                                                       bool on_device) {
  auto ring = std::make_shared<PinnedRing>(device, buffer_bytes, on_device);
  // Shared memory, so that a fork() does not replace the pinned pages by copies.
  void* at =
      mmap(nullptr, ring->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) {
    return Status(Code::kUnavailable,
                  "no memory for " + std::to_string(ring->bytes()) + " bytes of pinned buffers");
  }
  ring->host_ = static_cast<std::byte*>(at);
  auto mapped = device.map_host(at, ring->bytes());
  if (!mapped) return mapped.status();
  ring->device_address_ = static_cast<std::byte*>(mapped.value());
  if (on_device) {
    auto buffers = device.allocate(ring->all_buffers());
    if (!buffers) return buffers.status();
    ring->on_device_ = static_cast<std::byte*>(buffers.value());
  }
  auto arrived = device.create_flags();
  if (!arrived) return arrived.status();
  ring->arrived_ = std::move(arrived.value());
  for (device::Event& event : ring->copied_in_) {
    auto made = device.create_event();
    if (!made) return made.status();
    event = made.value();
  }
  return ring;
}

PinnedRing::~PinnedRing() {
  for (device::Event event : copied_in_) {
    if (event != nullptr) device_.destroy_event(event);
  }
  if (on_device_ != nullptr) device_.free(on_device_);
  if (device_address_ != nullptr) device_.unmap_host(host_);
  if (host_ != nullptr) munmap(host_, bytes());
}

}  // namespace smddp
