#include "device/gdr_flags.h"

#include "common/align.h"
#include "device/gdr.h"

namespace smddp::device {
namespace {

class FlagsOnGpu final : public HostFlags {
 public:
  FlagsOnGpu(Device& device, const Gdr& gdr, void* memory, uintptr_t page, Gdr::Mapping mapping)
      : device_(device), gdr_(gdr), memory_(memory), page_(page), mapping_(mapping) {
    for (size_t i = 0; i < kMost; ++i) set(i, 0);
  }
  ~FlagsOnGpu() override {
    gdr_.unmap(mapping_);
    device_.free(memory_);
  }
  uint32_t* on_device(size_t i) const override {
    return reinterpret_cast<uint32_t*>(page_ + i * kStride);
  }
  void set(size_t i, uint32_t value) override { gdr_.write(mapping_, i * kStride, value); }

 private:
  Device& device_;
  const Gdr& gdr_;
  void* const memory_;
  const uintptr_t page_;
  const Gdr::Mapping mapping_;
};

}  // namespace

Result<std::unique_ptr<HostFlags>> flags_on_gpu(Device& device) {
  const Result<Gdr>& gdr = Gdr::open();
  if (!gdr) return gdr.status();
  auto memory = device.allocate(2 * Gdr::kPage);
  if (!memory) return memory.status();
  uintptr_t page = align_up(reinterpret_cast<uintptr_t>(memory.value()), Gdr::kPage);
  auto mapping = gdr.value().map(page);
  if (!mapping) {
    device.free(memory.value());
    return mapping.status();
  }
  return std::unique_ptr<HostFlags>(
      std::make_unique<FlagsOnGpu>(device, gdr.value(), memory.value(), page, mapping.value()));
}

}  // namespace smddp::device
