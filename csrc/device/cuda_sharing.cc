#include "device/cuda_sharing.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace smddp::device {

using namespace cuda;

namespace {

// SYS_pidfd_open and SYS_pidfd_getfd, which older C libraries do not define. The numbers are the same on
// all architectures.
constexpr long kPidfdOpen = 434, kPidfdGetfd = 438;

Result<int> take_descriptor(int pid, int descriptor) {
  int process = static_cast<int>(syscall(kPidfdOpen, pid, 0));
  int taken = process < 0 ? -1 : static_cast<int>(syscall(kPidfdGetfd, process, descriptor, 0));
  int why = errno;
  if (process >= 0) close(process);
  if (taken >= 0) return taken;
  return Status(Code::kUnavailable,
                "could not get a memory handle of process " + std::to_string(pid) + ": " +
                    std::strerror(why) +
                    "; allow ptrace between ranks (kernel 5.6 or newer), or set "
                    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False");
}

}  // namespace

CudaSharing::~CudaSharing() {
  for (auto& [id, shared] : shareable_) close(shared);
}

Result<std::vector<Allocation>> CudaSharing::export_memory(const void* address, size_t bytes) {
  std::vector<Allocation> found;
  CUdeviceptr at = pointer(address), end = at + std::max<size_t>(bytes, 1);
  while (at < end) {
    int legacy = 0;
    Status s = query(&legacy, kIpcCapable, at);
    if (!s) return s;
    auto one = legacy != 0 ? export_whole(at) : export_mapped(at);
    if (!one) return one.status();
    found.push_back(one.value());
    at = one.value().base + one.value().bytes;
  }
  return found;
}

bool CudaSharing::still_allocated(const Allocation& allocation) {
  bool whole = allocation.kind == Allocation::Kind::kIpc;
  uint64_t id = 0;
  if (query(&id, whole ? kBufferId : kMemoryBlockId, allocation.base) && id == allocation.id)
    return true;
  std::lock_guard lock(mutex_);
  auto handle = handles_.find(allocation.base);
  if (handle != handles_.end() && handle->second.id == allocation.id) handles_.erase(handle);
  close_freed();
  return false;
}

Result<void*> CudaSharing::import_memory(const Allocation& allocation, int pid) {
  if (allocation.kind == Allocation::Kind::kShareable) return import_mapped(allocation, pid);
  if (allocation.kind != Allocation::Kind::kIpc) {
    return Status(Code::kInvalid, "a peer offered memory that is not GPU memory");
  }
  CUipcMemHandle handle;
  std::memcpy(handle.reserved, allocation.handle.data(), sizeof handle.reserved);
  CUdeviceptr base = 0;
  Status s = check(api_.cuIpcOpenMemHandle(&base, handle, kLazyPeerAccess), "cuIpcOpenMemHandle");
  return s ? Result<void*>(reinterpret_cast<void*>(base)) : Result<void*>(s);
}

void CudaSharing::release_memory(const Allocation& allocation, void* address) {
  if (allocation.kind == Allocation::Kind::kShareable) {
    api_.cuMemUnmap(pointer(address), allocation.bytes);
    api_.cuMemAddressFree(pointer(address), allocation.bytes);
  } else {
    api_.cuIpcCloseMemHandle(pointer(address));
  }
}

// Memory of cuMemAlloc(), which cudaMalloc() calls.
Result<Allocation> CudaSharing::export_whole(CUdeviceptr at) {
  Allocation a;
  a.kind = Allocation::Kind::kIpc;
  CUdeviceptr base = 0;
  size_t bytes = 0;
  Status s = check(api_.cuMemGetAddressRange(&base, &bytes, at), "cuMemGetAddressRange");
  if (s) s = query(&a.id, kBufferId, at);
  if (!s) return s;
  a.base = base;
  a.bytes = bytes;
  std::lock_guard lock(mutex_);
  auto [known, is_new] = handles_.try_emplace(base);
  if (is_new || known->second.id != a.id) {
    CUipcMemHandle handle;
    s = check(api_.cuIpcGetMemHandle(&handle, base), "cuIpcGetMemHandle");
    if (!s) {
      handles_.erase(known);
      return s;
    }
    std::memcpy(a.handle.data(), handle.reserved, sizeof handle.reserved);
    known->second = a;
  }
  return known->second;
}

// Memory that was made by cuMemCreate() and mapped piece by piece: torch's expandable segments.
Result<Allocation> CudaSharing::export_mapped(CUdeviceptr at) {
  Allocation a;
  a.kind = Allocation::Kind::kShareable;
  uint64_t types = 0;
  Status s = query(&types, kAllowedHandleTypes, at);
  if (!s) return s;
  if ((types & kPosixDescriptor) == 0) {
    return Status(Code::kUnavailable,
                  "this GPU memory can't be shared between processes: use torch's native "
                  "allocator (PYTORCH_CUDA_ALLOC_CONF=backend:native,expandable_segments:False)");
  }
  CUdeviceptr base = 0;
  size_t bytes = 0;
  s = query(&base, kMappingBase, at);
  if (s) s = query(&bytes, kMappingSize, at);
  if (s) s = query(&a.id, kMemoryBlockId, at);
  if (!s) return s;
  a.base = base;
  a.bytes = bytes;
  std::lock_guard lock(mutex_);
  auto known = shareable_.find(a.id);
  if (known == shareable_.end()) {
    CUmemGenericAllocationHandle handle = 0;
    s = check(api_.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(base)),
              "cuMemRetainAllocationHandle");
    if (!s) return s;
    int descriptor = -1;
    s = check(api_.cuMemExportToShareableHandle(&descriptor, handle, kPosixDescriptor, 0),
              "cuMemExportToShareableHandle");
    api_.cuMemRelease(handle);
    if (!s) return s;
    close_freed();
    known = shareable_.emplace(a.id, descriptor).first;
    mapped_[base] = a.id;
  }
  a.descriptor = known->second;
  return a;
}

// An open descriptor keeps the memory allocated. Closes the descriptors of memory that its owner has freed
// in the meantime.
void CudaSharing::close_freed() {
  for (auto old = mapped_.begin(); old != mapped_.end();) {
    uint64_t id = 0;
    if (query(&id, kMemoryBlockId, old->first) && id == old->second) {
      ++old;
      continue;
    }
    auto shared = shareable_.find(old->second);
    if (shared != shareable_.end()) {
      close(shared->second);
      shareable_.erase(shared);
    }
    old = mapped_.erase(old);
  }
}

Result<void*> CudaSharing::import_mapped(const Allocation& allocation, int pid) {
  auto descriptor = take_descriptor(pid, allocation.descriptor);
  if (!descriptor) return descriptor.status();
  CUmemGenericAllocationHandle handle = 0;
  auto as_pointer = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.value()));
  Status s = check(api_.cuMemImportFromShareableHandle(&handle, as_pointer, kPosixDescriptor),
                   "cuMemImportFromShareableHandle");
  close(descriptor.value());
  if (!s) return s;
  CUdeviceptr base = 0;
  s = check(api_.cuMemAddressReserve(&base, allocation.bytes, 0, 0, 0), "cuMemAddressReserve");
  if (s) {
    s = check(api_.cuMemMap(base, allocation.bytes, 0, handle, 0), "cuMemMap");
    CUmemAccessDesc access{{kLocationDevice, device_}, kReadWrite};
    if (s) {
      s = check(api_.cuMemSetAccess(base, allocation.bytes, &access, 1), "cuMemSetAccess");
      if (!s) api_.cuMemUnmap(base, allocation.bytes);
    }
    if (!s) api_.cuMemAddressFree(base, allocation.bytes);
  }
  api_.cuMemRelease(handle);  // from here on the mapping keeps the memory
  return s ? Result<void*>(reinterpret_cast<void*>(base)) : Result<void*>(s);
}

}  // namespace smddp::device
