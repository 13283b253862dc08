// GDRCopy (github.com/NVIDIA/gdrcopy), opened at run time. It maps GPU memory so that the CPU can write it
// over the PCIe bus. The flags that the CPU sets are in this memory, so that a waiting stream reads the
// GPU's own memory. Knows no stream. CudaDevice and cuda_report() call it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/status.h"

namespace smddp::device {

class Gdr {
 public:
  // Opens the library that SMDDP_DEBUG=libgdrapi names and its kernel module, both 2.0 or newer, on first use.
  // The error says why GDRCopy can't be used.
  static const Result<Gdr>& open();
  static Result<Gdr> open(const std::string& path);

  static constexpr size_t kPage = 64 << 10;  // mappings begin and end at multiples of this

  struct Handle {
    unsigned long h;
  };
  struct Mapping {
    Handle handle;
    void* address;  // in this process
  };
  // Maps one page of GPU memory.
  Result<Mapping> map(unsigned long long on_device) const;
  void unmap(const Mapping& mapping) const;
  // Ordered after all writes to host memory by this thread, and by threads that it has synchronised with.
  void write(const Mapping& mapping, size_t offset, uint32_t value) const;

  const std::string& version() const { return version_; }

 private:
  void* connection_ = nullptr;  // never closed: mappings may live as long as the process
  std::string version_;
  void* (*gdr_open)() = nullptr;
  int (*gdr_close)(void*) = nullptr;
  int (*gdr_pin_buffer)(void*, unsigned long, size_t, uint64_t, uint32_t, Handle*) = nullptr;
  int (*gdr_unpin_buffer)(void*, Handle) = nullptr;
  int (*gdr_map)(void*, Handle, void**, size_t) = nullptr;
  int (*gdr_unmap)(void*, Handle, void*, size_t) = nullptr;
  int (*gdr_copy_to_mapping)(Handle, void*, const void*, size_t) = nullptr;
  void (*gdr_runtime_get_version)(int*, int*) = nullptr;
  int (*gdr_driver_get_version)(void*, int*, int*) = nullptr;
};

}  // namespace smddp::device
