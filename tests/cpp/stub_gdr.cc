// A stub of libgdrapi. The memory of the CUDA stub's GPU is host memory, so a mapping of it is the memory
// itself. STUB_GDR_MAJOR sets the version that it reports. With STUB_GDR_NO_MODULE it behaves as if the
// kernel module were missing.
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace {

struct Handle {
  unsigned long h;
};
constexpr size_t kPage = 64 << 10;

int major_version() {
  const char* given = std::getenv("STUB_GDR_MAJOR");
  return given != nullptr ? std::atoi(given) : 2;
}

}  // namespace

#define STUB extern "C" __attribute__((visibility("default")))

STUB void* gdr_open() {
  static int connection;
  return std::getenv("STUB_GDR_NO_MODULE") == nullptr ? &connection : nullptr;
}
STUB int gdr_close(void*) { return 0; }
STUB int gdr_pin_buffer(void* connection, unsigned long address, size_t size, uint64_t token,
                        uint32_t space, Handle* handle) {
  if (connection == nullptr || address % kPage != 0 || size != kPage || token != 0 || space != 0)
    return EINVAL;
  handle->h = address;
  return 0;
}
STUB int gdr_unpin_buffer(void*, Handle) { return 0; }
STUB int gdr_map(void*, Handle handle, void** address, size_t size) {
  *address = reinterpret_cast<void*>(handle.h);
  return size == kPage ? 0 : EINVAL;
}
STUB int gdr_unmap(void*, Handle handle, void* address, size_t size) {
  return reinterpret_cast<unsigned long>(address) == handle.h && size == kPage ? 0 : EINVAL;
}
STUB int gdr_copy_to_mapping(Handle, void* to, const void* from, size_t size) {
  if (size != sizeof(uint32_t)) return EINVAL;
  __atomic_store_n(static_cast<uint32_t*>(to), *static_cast<const uint32_t*>(from),
                   __ATOMIC_RELEASE);
  return 0;
}
STUB void gdr_runtime_get_version(int* major, int* minor) {
  *major = major_version();
  *minor = 4;
}
STUB int gdr_driver_get_version(void*, int* major, int* minor) {
  *major = 2;
  *minor = 4;
  return 0;
}
