#include "device/device.h"

#include <atomic>
#include <utility>

#include "common/align.h"
#include "common/mapping.h"

namespace smddp::device {
namespace {

// Flags in pinned host memory, one per cache line.
class PinnedFlags final : public HostFlags {
 public:
  PinnedFlags(Device& device, Mapping here, void* on_device)
      : device_(device), here_(std::move(here)), on_device_(static_cast<std::byte*>(on_device)) {}
  ~PinnedFlags() override { device_.unmap_host(here_.data()); }
  uint32_t* on_device(size_t i) const override {
    return reinterpret_cast<uint32_t*>(on_device_ + i * kStride);
  }
  void set(size_t i, uint32_t value) override {
    std::atomic_ref(*reinterpret_cast<uint32_t*>(here_.data() + i * kStride))
        .store(value, std::memory_order_release);
  }

 private:
  Device& device_;
  const Mapping here_;
  std::byte* const on_device_;
};

}  // namespace

Result<std::unique_ptr<HostFlags>> Device::create_flags() {
  static_assert(HostFlags::kMost * HostFlags::kStride <= kPage);
  auto page = Mapping::map(kPage, MAP_SHARED);
  if (!page) return page.status();
  auto mapped = map_host(page.value().data(), kPage);
  if (!mapped) return mapped.status();
  return std::unique_ptr<HostFlags>(
      std::make_unique<PinnedFlags>(*this, std::move(page.value()), mapped.value()));
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
    if (Status s = create_stream().into(lanes_[i]); !s) return s;
  }
  return lanes_[i];
}

void Device::destroy_lanes() {
  for (Stream& lane : lanes_) destroy_stream(std::exchange(lane, nullptr));
}

}  // namespace smddp::device
