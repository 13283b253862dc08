// Sharing of GPU memory between the processes of a host: handles for this process's memory, and mappings
// of other processes' memory. Handles of both kinds (IPC handles, descriptors) are kept; the driver's id of an
// allocation shows whether a kept handle is still right. Knows no stream and no operation.
// CudaDevice calls it.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device/cuda_api.h"
#include "device/descriptor_server.h"
#include "device/device.h"

namespace smddp::device {

// In all calls the device's context must be current, and no call may become part of a graph that is being
// recorded.
class CudaSharing {
 public:
  CudaSharing(const cuda::Api& api, cuda::CUdevice device) : api_(api), device_(device) {}

  // As the functions of Device.
  Result<std::vector<Allocation>> export_memory(const void* address, size_t bytes);
  size_t recall(const void* address, size_t bytes);
  Result<void*> import_memory(const Allocation& allocation, int pid);
  void release_memory(const Allocation& allocation, void* address);

 private:
  Status check(cuda::CUresult result, const char* what) const { return api_.check(result, what); }
  Status query(void* value, int which, cuda::CUdeviceptr at) {
    return check(api_.cuPointerGetAttribute(value, which, at), "cuPointerGetAttribute");
  }
  std::optional<Allocation> find_known(cuda::CUdeviceptr at);
  // Whether the driver's id at an address of the allocation still is its own.
  bool lives(const Allocation& a, cuda::CUdeviceptr at);
  // The allocation that contains the address.
  Result<Allocation> export_one(cuda::CUdeviceptr at);
  Status locate_whole(Allocation& a, cuda::CUdeviceptr at);
  Status locate_mapped(Allocation& a, cuda::CUdeviceptr at);
  // All under mutex_.
  Status export_handle(Allocation& a) const;
  Status export_descriptor(Allocation& a);
  void close_freed();
  void forget(std::map<cuda::CUdeviceptr, Allocation>::iterator known);
  Result<void*> import_mapped(const Allocation& allocation, int pid);

  const cuda::Api& api_;
  const cuda::CUdevice device_;
  std::mutex mutex_;
  std::map<cuda::CUdeviceptr, Allocation> handles_;  // by base
  std::unique_ptr<RecallServer> recalls_;            // made for the first handle
  std::unique_ptr<DescriptorServer> server_;         // has the descriptors; made for the first one
};

}  // namespace smddp::device
