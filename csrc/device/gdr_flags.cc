#include "device/gdr_flags.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/align.h"
#include "common/env.h"

namespace smddp::device {
namespace {

constexpr int kMajor = 2;              // the version of these functions; 1.x had others
constexpr size_t kGpuPage = 64 << 10;  // mappings begin and end at multiples of this

std::string text(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

struct Handle {
  unsigned long h;
};

// X(type, name, parameters)
#define SMDDP_GDR_FUNCTIONS(X)                                                        \
  X(void*, gdr_open, ())                                                              \
  X(int, gdr_close, (void*))                                                          \
  X(int, gdr_pin_buffer, (void*, unsigned long, size_t, uint64_t, uint32_t, Handle*)) \
  X(int, gdr_unpin_buffer, (void*, Handle))                                           \
  X(int, gdr_map, (void*, Handle, void**, size_t))                                    \
  X(int, gdr_unmap, (void*, Handle, void*, size_t))                                   \
  X(int, gdr_copy_to_mapping, (Handle, void*, const void*, size_t))                   \
  X(void, gdr_runtime_get_version, (int*, int*))                                      \
  X(int, gdr_driver_get_version, (void*, int*, int*))

struct Gdr {
  static Result<Gdr> open(const std::string& path);

#define SMDDP_MEMBER(type, name, parameters) type(*name) parameters = nullptr;
  SMDDP_GDR_FUNCTIONS(SMDDP_MEMBER)
#undef SMDDP_MEMBER
  void* connection = nullptr;
};

Result<Gdr> Gdr::open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return Status(Code::kUnavailable,
                  "could not open GDRCopy (" + std::string(why != nullptr ? why : path) + ")");
  }
  Gdr gdr;
  const char* missing = nullptr;
  auto take = [&](const char* name, auto& function) {
    void* address = dlsym(library, name);
    if (address == nullptr) missing = name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  auto refuse = [&](const std::string& why) {
    dlclose(library);
    return Status(Code::kUnavailable, path + why);
  };
#define SMDDP_TAKE(type, name, parameters) take(#name, gdr.name);
  SMDDP_GDR_FUNCTIONS(SMDDP_TAKE)
#undef SMDDP_TAKE
  if (missing != nullptr)
    return refuse(std::string(" has no ") + missing + ": GDRCopy 2.0 or newer is needed");
  int major = 0, minor = 0;
  gdr.gdr_runtime_get_version(&major, &minor);
  if (major != kMajor) return refuse(" is version " + text(major, minor) + "; 2.x is needed");
  gdr.connection = gdr.gdr_open();
  if (gdr.connection == nullptr)
    return refuse(" does not find /dev/gdrdrv: load the kernel module gdrdrv");
  if (gdr.gdr_driver_get_version(gdr.connection, &major, &minor) != 0 || major != kMajor) {
    gdr.gdr_close(gdr.connection);
    return refuse(": the kernel module gdrdrv is version " + text(major, minor) +
                  "; 2.x is needed");
  }
  return gdr;
}

// In one page of the GPU's memory.
class FlagsOnGpu final : public HostFlags {
 public:
  FlagsOnGpu(Device& device, const Gdr& gdr, void* memory)
      : device_(device),
        gdr_(gdr),
        memory_(memory),
        page_(align_up(reinterpret_cast<uintptr_t>(memory), kGpuPage)) {}
  ~FlagsOnGpu() override {
    if (here_ != nullptr) gdr_.gdr_unmap(gdr_.connection, handle_, here_, kGpuPage);
    if (pinned_) gdr_.gdr_unpin_buffer(gdr_.connection, handle_);
    gdr_.gdr_close(gdr_.connection);
    device_.free(memory_);
  }
  Status map() {
    int why = gdr_.gdr_pin_buffer(gdr_.connection, page_, kGpuPage, 0, 0, &handle_);
    pinned_ = why == 0;
    if (pinned_) why = gdr_.gdr_map(gdr_.connection, handle_, &here_, kGpuPage);
    if (why != 0)
      return {Code::kUnavailable,
              std::string("GDRCopy could not map GPU memory: ") + std::strerror(why)};
    for (size_t i = 0; i < kMost; ++i) set(i, 0);
    return {};
  }
  uint32_t* on_device(size_t i) const override {
    return reinterpret_cast<uint32_t*>(page_ + i * kStride);
  }
  // The mapping is write-combining: a plain store could become visible before earlier stores to ordinary
  // memory. The fence keeps the earlier stores before it, also those of threads that this one has synchronised with,
  // and the library's own fence flushes the store.
  void set(size_t i, uint32_t value) override {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    gdr_.gdr_copy_to_mapping(handle_, static_cast<std::byte*>(here_) + i * kStride, &value,
                             sizeof value);
  }

 private:
  Device& device_;
  const Gdr gdr_;
  void* const memory_;
  const uintptr_t page_;  // in `memory_`
  Handle handle_{};
  bool pinned_ = false;
  void* here_ = nullptr;  // the page's address in this process
};

}  // namespace

Result<std::unique_ptr<HostFlags>> flags_on_gpu(Device& device) {
  auto memory = device.allocate(2 * kGpuPage);
  if (!memory) return memory.status();
  auto gdr = Gdr::open(env::debug("libgdrapi"));
  if (!gdr) {
    device.free(memory.value());
    return gdr.status();
  }
  auto flags = std::make_unique<FlagsOnGpu>(device, gdr.value(), memory.value());
  if (Status mapped = flags->map(); !mapped) return mapped;
  return std::unique_ptr<HostFlags>(std::move(flags));
}

}  // namespace smddp::device
