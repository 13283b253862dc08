// A GPU's memory in other processes of the host: handles for what this process has, mappings of what
// others have. Both are kept, by the driver's id of an allocation.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "device/cuda_api.h"
#include "device/device.h"

namespace smddp::device {

// All calls with the device's context current, and none of them part of a graph that is recorded.
class CudaSharing {
 public:
  CudaSharing(const cuda::Api& api, cuda::CUdevice device) : api_(api), device_(device) {}
  ~CudaSharing();

  // As Device's.
  Result<std::vector<Allocation>> export_memory(const void* address, size_t bytes);
  Result<void*> import_memory(const Allocation& allocation, int pid);
  void release_memory(const Allocation& allocation, void* address);

 private:
  Status check(cuda::CUresult result, const char* what) const { return api_.check(result, what); }
  Status query(void* value, int which, cuda::CUdeviceptr at) {
    return check(api_.cuPointerGetAttribute(value, which, at), "cuPointerGetAttribute");
  }
  Result<Allocation> export_whole(cuda::CUdeviceptr at);
  Result<Allocation> export_mapped(cuda::CUdeviceptr at);
  void forget_what_is_gone();
  Result<void*> import_mapped(const Allocation& allocation, int pid);

  const cuda::Api& api_;
  const cuda::CUdevice device_;
  std::mutex mutex_;
  std::map<cuda::CUdeviceptr, Allocation> handles_;  // by base
  std::map<uint64_t, int> shareable_;                // descriptors by physical memory
  std::map<cuda::CUdeviceptr, uint64_t> mapped_;     // that memory by base
};

}  // namespace smddp::device
