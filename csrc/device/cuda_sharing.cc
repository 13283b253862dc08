#include "device/cuda_sharing.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/descriptors.h"

namespace smddp::device {

using namespace cuda;

namespace {

constexpr long kPidfdGetfd = 438;  // SYS_pidfd_getfd, which older C libraries do not define

Result<FileDescriptor> from_process(int pid, int descriptor) {
  FileDescriptor process = open_process(pid);
  FileDescriptor taken(
      process ? static_cast<int>(syscall(kPidfdGetfd, process.get(), descriptor, 0)) : -1);
  if (taken) return taken;
  return errno_status("taking it from the process failed");
}

// By its id first: another descriptor may have taken the number since.
Result<FileDescriptor> take_descriptor(const Allocation& allocation, int pid) {
  SocketName name;
  std::memcpy(name.data(), allocation.handle.data(), name.size());
  auto served = DescriptorServer::take(name, allocation.id);
  if (served || served.status().code() != Code::kUnavailable) return served;
  auto taken = from_process(pid, allocation.descriptor);
  if (taken) return taken;
  return Status(Code::kUnavailable,
                "could not get a memory handle of process " + std::to_string(pid) + ": " +
                    served.status().message() + "; " + taken.status().message() +
                    "; let the ranks of a host share a network namespace, or set "
                    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False");
}

}  // namespace

Result<std::vector<Allocation>> CudaSharing::export_memory(const void* address, size_t bytes) {
  std::vector<Allocation> found;
  CUdeviceptr at = pointer(address), end = at + std::max<size_t>(bytes, 1);
  while (at < end) {
    auto one = export_one(at);
    if (!one) return one.status();
    found.push_back(one.value());
    at = one.value().base + one.value().bytes;
  }
  return found;
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

Result<Allocation> CudaSharing::export_one(CUdeviceptr at) {
  if (auto known = find_known(at)) return *known;
  Allocation a;
  int legacy = 0;
  Status s = query(&legacy, kIpcCapable, at);
  if (s) s = legacy != 0 ? locate_whole(a, at) : locate_mapped(a, at);
  if (!s) return s;
  std::lock_guard lock(mutex_);
  close_freed();
  if (!recalls_) s = RecallServer::open().into(recalls_);
  if (s) s = legacy != 0 ? export_handle(a) : export_descriptor(a);
  if (!s) return s;
  a.owner = recalls_->name();
  return handles_[a.base] = a;
}

std::optional<Allocation> CudaSharing::find_known(CUdeviceptr at) {
  std::lock_guard lock(mutex_);
  auto next = handles_.upper_bound(at);
  if (next == handles_.begin()) return std::nullopt;
  const Allocation& a = std::prev(next)->second;
  return at < a.base + a.bytes && lives(a, at) ? std::optional(a) : std::nullopt;
}

bool CudaSharing::lives(const Allocation& a, CUdeviceptr at) {
  uint64_t id = 0;
  int which = a.kind == Allocation::Kind::kIpc ? kBufferId : kMemoryBlockId;
  return query(&id, which, at) && id == a.id;
}

// Memory of cuMemAlloc(), which cudaMalloc() calls.
Status CudaSharing::locate_whole(Allocation& a, CUdeviceptr at) {
  a.kind = Allocation::Kind::kIpc;
  CUdeviceptr base = 0;
  size_t bytes = 0;
  Status s = check(api_.cuMemGetAddressRange(&base, &bytes, at), "cuMemGetAddressRange");
  a.base = base;
  a.bytes = bytes;
  return s ? query(&a.id, kBufferId, at) : s;
}

// Memory that was made by cuMemCreate() and mapped piece by piece: torch's expandable segments.
Status CudaSharing::locate_mapped(Allocation& a, CUdeviceptr at) {
  a.kind = Allocation::Kind::kShareable;
  uint64_t types = 0;
  Status s = query(&types, kAllowedHandleTypes, at);
  if (s && (types & kPosixDescriptor) == 0) {
    return {Code::kUnavailable,
            "this GPU memory can't be shared between processes: use torch's native "
            "allocator (PYTORCH_CUDA_ALLOC_CONF=backend:native,expandable_segments:False)"};
  }
  if (s) s = query(&a.base, kMappingBase, at);
  if (s) s = query(&a.bytes, kMappingSize, at);
  return s ? query(&a.id, kMemoryBlockId, at) : s;
}

Status CudaSharing::export_handle(Allocation& a) const {
  CUipcMemHandle handle;
  Status s = check(api_.cuIpcGetMemHandle(&handle, a.base), "cuIpcGetMemHandle");
  std::memcpy(a.handle.data(), handle.reserved, sizeof handle.reserved);
  return s;
}

Status CudaSharing::export_descriptor(Allocation& a) {
  if (!server_) {
    if (Status s = DescriptorServer::open().into(server_); !s) return s;
  }
  make_room_for_descriptors(handles_.size(), "GPU memory in many pieces");
  CUmemGenericAllocationHandle handle = 0;
  Status s = check(api_.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(a.base)),
                   "cuMemRetainAllocationHandle");
  if (!s) return s;
  s = check(api_.cuMemExportToShareableHandle(&a.descriptor, handle, kPosixDescriptor, 0),
            "cuMemExportToShareableHandle");
  api_.cuMemRelease(handle);
  if (!s) return s;
  server_->offer(a.id, FileDescriptor(a.descriptor));
  std::memcpy(a.handle.data(), server_->name().data(), server_->name().size());
  return {};
}

// A handle of freed memory is forgotten here as well, and its descriptor closed: that keeps memory allocated. A
// handle that a peer still uses is kept, so that a further recall asks again; but not a descriptor's, whose memory
// exists as long as a process has it mapped, also after its owner has freed it.
size_t CudaSharing::recall(const void* address, size_t bytes) {
  CUdeviceptr from = pointer(address), to = from + bytes;
  std::vector<RecalledMemory> recalled;
  {
    std::lock_guard lock(mutex_);
    for (auto known = handles_.lower_bound(from); known != handles_.end() && known->first < to;) {
      recalled.push_back({known->first, known->second.id});
      auto at = known++;
      if (at->second.kind == Allocation::Kind::kShareable) forget(at);
    }
    if (recalled.empty()) return 0;
  }
  // The peers' mappings may be in use until the streams are done, for which cuMemFree() waits as well.
  (void)api_.cuCtxSynchronize();
  size_t late = recalls_->recall(recalled);
  std::lock_guard lock(mutex_);
  for (const RecalledMemory& each : recalled) {
    auto known = handles_.find(each.base);
    if (late == 0 && known != handles_.end() && known->second.id == each.id) forget(known);
  }
  return late;
}

// An open descriptor keeps the memory allocated. Closes the descriptors of memory that its owner has freed
// in the meantime.
void CudaSharing::close_freed() {
  for (auto at = handles_.begin(); at != handles_.end();) {
    auto known = at++;
    if (known->second.kind != Allocation::Kind::kShareable) continue;
    if (!lives(known->second, known->first)) forget(known);
  }
}

void CudaSharing::forget(std::map<CUdeviceptr, Allocation>::iterator known) {
  if (server_) server_->withdraw(known->second.id);
  handles_.erase(known);
}

Result<void*> CudaSharing::import_mapped(const Allocation& allocation, int pid) {
  auto descriptor = take_descriptor(allocation, pid);
  if (!descriptor) return descriptor.status();
  auto as_pointer = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.value().get()));
  CUmemGenericAllocationHandle handle = 0;
  Status s = check(api_.cuMemImportFromShareableHandle(&handle, as_pointer, kPosixDescriptor),
                   "cuMemImportFromShareableHandle");
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
