#include "device/device.h"

#include <sys/mman.h>

#include <atomic>
#include <utility>

#include "common/align.h"

namespace smddp::device {
namespace {

// Flags in pinned host memory, one per cache line.
class PinnedFlags final : public HostFlags {
 public:
  PinnedFlags(Device& device, std::byte* here, std::byte* on_device)
      : device_(device), here_(here), on_device_(on_device) {}
  ~PinnedFlags() override {
    device_.unmap_host(here_);
    munmap(here_, kPage);
  }
  uint32_t* on_device(size_t i) const override {
    return reinterpret_cast<uint32_t*>(on_device_ + i * kStride);
  }
  void set(size_t i, uint32_t value) override {
    std::atomic_ref(*reinterpret_cast<uint32_t*>(here_ + i * kStride))
        .store(value, std::memory_order_release);
  }

 private:
  Device& device_;
  std::byte *const here_, *const on_device_;
};

}  // namespace

Result<std::unique_ptr<HostFlags>> Device::create_flags() {
  static_assert(HostFlags::kMost * HostFlags::kStride <= kPage);
  void* at = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) {
    return errno_status("could not allocate a page of flags");
  }
  auto mapped = map_host(at, kPage);
  if (!mapped) {
    munmap(at, kPage);
    return mapped.status();
  }
  return std::unique_ptr<HostFlags>(std::make_unique<PinnedFlags>(
      *this, static_cast<std::byte*>(at), static_cast<std::byte*>(mapped.value())));
}

Status Device::one_by_one(Stream stream, std::span<const Copy> all) {
  Status s;
  for (const Copy& each : all) {
    if (s) s = copy(stream, each.to, each.from, each.bytes);
  }
  return s;
}

Result<Stream> Device::lane(size_t i) {
  std::lock_guard lock(lanes_mutex_);
  if (lanes_[i] == nullptr) {
    auto made = create_stream();
    if (!made) return made.status();
    lanes_[i] = made.value();
  }
  return lanes_[i];
}

void Device::destroy_lanes() {
  for (Stream& lane : lanes_) {
    if (lane != nullptr) destroy_stream(std::exchange(lane, nullptr));
  }
}

}  // namespace smddp::device
