#include "device/gdr.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/env.h"

namespace smddp::device {
namespace {

constexpr int kMajor = 2;  // the version of these functions; 1.x had others

std::string text(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

}  // namespace

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
  take("gdr_open", gdr.gdr_open);
  take("gdr_close", gdr.gdr_close);
  take("gdr_pin_buffer", gdr.gdr_pin_buffer);
  take("gdr_unpin_buffer", gdr.gdr_unpin_buffer);
  take("gdr_map", gdr.gdr_map);
  take("gdr_unmap", gdr.gdr_unmap);
  take("gdr_copy_to_mapping", gdr.gdr_copy_to_mapping);
  take("gdr_runtime_get_version", gdr.gdr_runtime_get_version);
  take("gdr_driver_get_version", gdr.gdr_driver_get_version);
  if (missing != nullptr)
    return refuse(std::string(" has no ") + missing + ": GDRCopy 2.0 or newer is needed");
  int major = 0, minor = 0;
  gdr.gdr_runtime_get_version(&major, &minor);
  gdr.version_ = text(major, minor);
  if (major != kMajor) return refuse(" is version " + gdr.version_ + "; 2.x is needed");
  gdr.connection_ = gdr.gdr_open();
  if (gdr.connection_ == nullptr)
    return refuse(" does not find /dev/gdrdrv: load the kernel module gdrdrv");
  if (gdr.gdr_driver_get_version(gdr.connection_, &major, &minor) != 0 || major != kMajor) {
    gdr.gdr_close(gdr.connection_);
    return refuse(": the kernel module gdrdrv is version " + text(major, minor) +
                  "; 2.x is needed");
  }
  return gdr;
}

const Result<Gdr>& Gdr::open() {
  static const auto* opened = new Result<Gdr>(open(env::debug("libgdrapi")));
  return *opened;
}

Result<Gdr::Mapping> Gdr::map(unsigned long long on_device) const {
  Mapping mapping{};
  int why = gdr_pin_buffer(connection_, on_device, kPage, 0, 0, &mapping.handle);
  if (why == 0) {
    why = gdr_map(connection_, mapping.handle, &mapping.address, kPage);
    if (why != 0) gdr_unpin_buffer(connection_, mapping.handle);
  }
  if (why == 0) return mapping;
  return Status(Code::kUnavailable,
                std::string("GDRCopy could not map GPU memory: ") + std::strerror(why));
}

void Gdr::unmap(const Mapping& mapping) const {
  gdr_unmap(connection_, mapping.handle, mapping.address, kPage);
  gdr_unpin_buffer(connection_, mapping.handle);
}

// The mapping is write-combining: a plain store could become visible before earlier stores to ordinary
// memory. The fence keeps the earlier stores before it, and the library's own fence flushes the store.
void Gdr::write(const Mapping& mapping, size_t offset, uint32_t value) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  gdr_copy_to_mapping(mapping.handle, static_cast<std::byte*>(mapping.address) + offset, &value,
                      sizeof value);
}

}  // namespace smddp::device
