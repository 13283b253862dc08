// The memory of a pipeline's chunks in flight: a page of the flags that streams set, pinned and mapped on the
// device, then the buffers, which are pinned too or lie on the device. The flags that the host sets lie where
// the device wants them. It knows no collective. ChunkBuffers makes it; chunks that
// the engine still ends keep it alive.
#pragma once

#include <atomic>
#include <memory>

#include "common/align.h"
#include "common/mapping.h"
#include "device/device.h"

namespace smddp {

class PinnedRing {
 public:
  static constexpr size_t kBuffers = 4;

  static Result<std::shared_ptr<PinnedRing>> create(device::Device& device, size_t buffer_bytes,
                                                    bool on_device);
  PinnedRing(device::Device& device, size_t buffer_bytes, bool on_device)
      : device_(device), buffer_bytes_(buffer_bytes), pinned_(!on_device) {}
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;
  ~PinnedRing();

  size_t buffer_bytes() const { return buffer_bytes_; }
  size_t all_buffers() const { return kBuffers * buffer_bytes_; }
  // The address for collectives of the CPU, and the address for streams.
  std::byte* buffer(size_t i) const {
    return (pinned_ ? host_.data() + kPage : on_device_) + i * buffer_bytes_;
  }
  std::byte* buffer_on_device(size_t i) const {
    return (pinned_ ? device_address_ + kPage : on_device_) + i * buffer_bytes_;
  }
  device::Event copied_in(size_t i) const { return copied_in_[i]; }

  uint32_t* filled_on_device(size_t i) const { return &flags(device_address_)[i].filled; }
  uint32_t* arrived_on_device(size_t i) const { return arrived_->on_device(i); }
  uint32_t filled(size_t i) const {
    return std::atomic_ref(flags(host_.data())[i].filled).load(std::memory_order_acquire);
  }
  // Ordered after everything that the collective wrote into the buffer.
  void set_arrived(size_t i, uint32_t number) const { arrived_->set(i, number); }

 private:
  struct Flags {
    alignas(64) uint32_t filled;
  };
  static_assert(sizeof(Flags) * kBuffers <= kPage);
  static Flags* flags(std::byte* at) { return reinterpret_cast<Flags*>(at); }
  size_t bytes() const { return kPage + (pinned_ ? all_buffers() : 0); }

  device::Device& device_;
  const size_t buffer_bytes_;
  const bool pinned_;
  Mapping host_;
  std::byte *device_address_ = nullptr, *on_device_ = nullptr;
  std::unique_ptr<device::HostFlags> arrived_;
  device::Event copied_in_[kBuffers] = {};
};

}  // namespace smddp
