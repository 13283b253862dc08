#include "device/cuda_device.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "device/cuda_api.h"
#include "device/cuda_kernels.h"

namespace smddp::device {
namespace {

using namespace cuda;

constexpr unsigned kThreads = 1024;  // as the kernels' launch bounds
// Below this a block has less to do than it costs to start.
constexpr size_t kBytesPerBlock = 64 << 10;

CUdeviceptr pointer(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }
CUstream stream_of(Stream stream) { return static_cast<CUstream>(stream); }
CUevent event_of(Event event) { return static_cast<CUevent>(event); }

// SYS_pidfd_open and SYS_pidfd_getfd, which older C libraries lack; equal on all architectures.
constexpr long kPidfdOpen = 434, kPidfdGetfd = 438;

Result<int> take_descriptor(int pid, int descriptor) {
  int process = static_cast<int>(syscall(kPidfdOpen, pid, 0));
  int taken = process < 0 ? -1 : static_cast<int>(syscall(kPidfdGetfd, process, descriptor, 0));
  int why = errno;
  if (process >= 0) close(process);
  if (taken >= 0) return taken;
  return Status(Code::kUnavailable,
                "could not take a memory handle of process " + std::to_string(pid) + ": " +
                    std::strerror(why) +
                    "; allow ptrace between ranks (kernel 5.6 or newer), or set "
                    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False");
}

class CudaDevice final : public Device {
 public:
  CudaDevice(const Api& api, int ordinal) : api_(api), ordinal_(ordinal) {}
  ~CudaDevice() override {
    if (context_ == nullptr) return;
    {
      Inside inside(*this);
      for (auto& [id, shared] : shareable_) close(shared);
      if (module_ != nullptr) api_.cuModuleUnload(module_);
    }
    api_.cuDevicePrimaryCtxRelease(device_);
  }

  Status open() {
    Status s = check(api_.cuDeviceGet(&device_, ordinal_), "cuDeviceGet");
    if (s) s = check(api_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
    int unified = 0, flush = 0;
    if (s) s = attribute(kMultiprocessorCount, &multiprocessors_);
    if (s) s = attribute(kUnifiedAddressing, &unified);
    if (s) s = attribute(kCanFlushRemoteWrites, &flush);
    if (s && unified == 0) {
      s = {Code::kUnavailable, "the GPU has no unified addressing; only 64-bit Linux is supported"};
    }
    wait_flags_ = kWaitEqual | (flush != 0 ? kWaitFlush : 0);
    char text[128] = "";
    if (s) s = check(api_.cuDeviceGetName(text, sizeof text, device_), "cuDeviceGetName");
    name_ = text;
    CUuuid uuid{};
    if (s) s = check(api_.cuDeviceGetUuid(&uuid, device_), "cuDeviceGetUuid");
    std::memcpy(identity_.data(), uuid.bytes, sizeof uuid.bytes);
    return s;
  }

  std::string name() const override { return name_; }
  int multiprocessors() const override { return multiprocessors_; }
  std::array<uint8_t, 16> identity() const override { return identity_; }

  Result<Stream> create_stream() override {
    Inside inside(*this);
    CUstream stream = nullptr;
    Status s = check(api_.cuStreamCreate(&stream, kStreamNonBlocking), "cuStreamCreate");
    return s ? Result<Stream>(stream) : Result<Stream>(s);
  }
  void destroy_stream(Stream stream) override {
    Inside inside(*this);
    api_.cuStreamDestroy(stream_of(stream));
  }
  Result<Event> create_event() override {
    Inside inside(*this);
    CUevent event = nullptr;
    Status s = check(api_.cuEventCreate(&event, kEventDisableTiming), "cuEventCreate");
    return s ? Result<Event>(event) : Result<Event>(s);
  }
  void destroy_event(Event event) override {
    Inside inside(*this);
    api_.cuEventDestroy(event_of(event));
  }
  Status record(Event event, Stream stream) override {
    Inside inside(*this);
    return check(api_.cuEventRecord(event_of(event), stream_of(stream)), "cuEventRecord");
  }
  Status wait(Stream stream, Event event) override {
    Inside inside(*this);
    return check(api_.cuStreamWaitEvent(stream_of(stream), event_of(event), 0),
                 "cuStreamWaitEvent");
  }
  Result<bool> done(Event event) override {
    Inside inside(*this);
    Relaxed relaxed(*this);  // another thread may be recording a graph
    CUresult result = api_.cuEventQuery(event_of(event));
    if (result == kNotReady) return false;
    Status s = check(result, "work of the GPU");
    return s ? Result<bool>(true) : Result<bool>(s);
  }
  Status synchronize(Stream stream) override {
    Inside inside(*this);
    return check(api_.cuStreamSynchronize(stream_of(stream)), "cuStreamSynchronize");
  }
  Result<bool> capturing(Stream stream) override {
    Inside inside(*this);
    int state = kCaptureNone;
    Status s = check(api_.cuStreamIsCapturing(stream_of(stream), &state), "cuStreamIsCapturing");
    return s ? Result<bool>(state != kCaptureNone) : Result<bool>(s);
  }

  Status copy(Stream stream, void* to, const void* from, size_t bytes) override {
    Inside inside(*this);
    return check(api_.cuMemcpyAsync(pointer(to), pointer(from), bytes, stream_of(stream)),
                 "cuMemcpyAsync");
  }
  // The device's own name for the flag is its address: see map_host().
  Status write_flag(Stream stream, uint32_t* flag, uint32_t value) override {
    Inside inside(*this);
    return check(api_.cuStreamWriteValue32(stream_of(stream), pointer(flag), value, 0),
                 "cuStreamWriteValue32");
  }
  Status wait_flag(Stream stream, uint32_t* flag, uint32_t value) override {
    Inside inside(*this);
    return check(api_.cuStreamWaitValue32(stream_of(stream), pointer(flag), value, wait_flags_),
                 "cuStreamWaitValue32");
  }
  Status call(Stream stream, void (*function)(void*), void* argument) override {
    Inside inside(*this);
    return check(api_.cuLaunchHostFunc(stream_of(stream), function, argument), "cuLaunchHostFunc");
  }

  Status reduce(Stream stream, const Reduction& reduction) override {
    if (reduction.count == 0) return {};
    auto function = kernel(reduction.dtype, reduction.op);
    if (!function) return function.status();
    Inside inside(*this);
    size_t useful = reduction.count * size_of(reduction.dtype) / kBytesPerBlock + 1;
    auto most = static_cast<size_t>(std::clamp(reduction.blocks, 1, multiprocessors_));
    Reduction copy = reduction;  // the driver takes a pointer that is not const
    void* parameters[] = {&copy};
    return check(
        api_.cuLaunchKernel(function.value(), static_cast<unsigned>(std::min(useful, most)), 1, 1,
                            kThreads, 1, 1, 0, stream_of(stream), parameters, nullptr),
        "cuLaunchKernel");
  }

  Result<std::vector<Allocation>> export_memory(const void* address, size_t bytes) override {
    Inside inside(*this);
    Relaxed relaxed(*this);
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

  Result<void*> import_memory(const Allocation& allocation, int pid) override {
    Inside inside(*this);
    Relaxed relaxed(*this);
    if (allocation.kind == Allocation::Kind::kShareable) return import_mapped(allocation, pid);
    if (allocation.kind != Allocation::Kind::kIpc) {
      return Status(Code::kInvalid, "a peer offered memory that is not a GPU's");
    }
    CUipcMemHandle handle;
    std::memcpy(handle.reserved, allocation.handle.data(), sizeof handle.reserved);
    CUdeviceptr base = 0;
    Status s = check(api_.cuIpcOpenMemHandle(&base, handle, kLazyPeerAccess), "cuIpcOpenMemHandle");
    return s ? Result<void*>(reinterpret_cast<void*>(base)) : Result<void*>(s);
  }

  void release_memory(const Allocation& allocation, void* address) override {
    Inside inside(*this);
    Relaxed relaxed(*this);
    if (allocation.kind == Allocation::Kind::kShareable) {
      api_.cuMemUnmap(pointer(address), allocation.bytes);
      api_.cuMemAddressFree(pointer(address), allocation.bytes);
    } else {
      api_.cuIpcCloseMemHandle(pointer(address));
    }
  }

  Result<void*> map_host(void* address, size_t bytes) override {
    Inside inside(*this);
    Relaxed relaxed(*this);
    Status s = check(api_.cuMemHostRegister(address, bytes, kRegisterPortable | kRegisterMapped),
                     "cuMemHostRegister");
    if (!s) return s;
    CUdeviceptr here = 0;
    s = check(api_.cuMemHostGetDevicePointer(&here, address, 0), "cuMemHostGetDevicePointer");
    return s ? Result<void*>(reinterpret_cast<void*>(here)) : Result<void*>(s);
  }
  void unmap_host(void* address) override {
    Inside inside(*this);
    api_.cuMemHostUnregister(address);
  }

 private:
  // The device's context is this thread's while one of these lives.
  class Inside {
   public:
    explicit Inside(const CudaDevice& device) : device_(device) {
      device_.api_.cuCtxPushCurrent(device_.context_);
    }
    ~Inside() {
      CUcontext left = nullptr;
      device_.api_.cuCtxPopCurrent(&left);
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    const CudaDevice& device_;
  };
  // Mapping memory is not part of a graph that is being recorded, and does not spoil it.
  class Relaxed {
   public:
    explicit Relaxed(const CudaDevice& device) : device_(device) {
      device_.api_.cuThreadExchangeStreamCaptureMode(&mode_);
    }
    ~Relaxed() { device_.api_.cuThreadExchangeStreamCaptureMode(&mode_); }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

   private:
    const CudaDevice& device_;
    int mode_ = kCaptureRelaxed;
  };

  Status check(CUresult result, const char* what) const { return api_.check(result, what); }
  Status attribute(int which, int* value) {
    return check(api_.cuDeviceGetAttribute(value, which, device_), "cuDeviceGetAttribute");
  }
  Status query(void* value, int which, CUdeviceptr at) {
    return check(api_.cuPointerGetAttribute(value, which, at), "cuPointerGetAttribute");
  }

  // Memory of cuMemAlloc(), which is what cudaMalloc() calls.
  Result<Allocation> export_whole(CUdeviceptr at) {
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
  Result<Allocation> export_mapped(CUdeviceptr at) {
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
      forget_what_is_gone();
      known = shareable_.emplace(a.id, descriptor).first;
      mapped_[base] = a.id;
    }
    a.descriptor = known->second;
    return a;
  }

  // A descriptor keeps the memory: those of what its owner has freed since are closed.
  void forget_what_is_gone() {
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

  Result<void*> import_mapped(const Allocation& allocation, int pid) {
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
    api_.cuMemRelease(handle);  // the mapping holds it from here on
    return s ? Result<void*>(reinterpret_cast<void*>(base)) : Result<void*>(s);
  }

  Result<CUfunction> kernel(Dtype dtype, ReduceOp op) {
    std::lock_guard lock(mutex_);
    auto known = functions_.find({dtype, op});
    if (known != functions_.end()) return known->second;
    const char* name = kernel_name(dtype, op);
    if (name == nullptr || cuda_kernels() == nullptr) {
      return Status(Code::kUnavailable,
                    "this build has no kernels: build it where nvcc is found, or set "
                    "SMDDP_DEVICE=off");
    }
    Inside inside(*this);
    Relaxed relaxed(*this);
    Status s;
    if (module_ == nullptr) {
      s = check(api_.cuModuleLoadData(&module_, cuda_kernels()), "cuModuleLoadData");
      if (!s) return s;
    }
    CUfunction function = nullptr;
    s = check(api_.cuModuleGetFunction(&function, module_, name), "cuModuleGetFunction");
    if (!s) return s;
    functions_[{dtype, op}] = function;
    return function;
  }

  const Api& api_;
  const int ordinal_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  int multiprocessors_ = 0;
  unsigned wait_flags_ = kWaitEqual;
  std::string name_;
  std::array<uint8_t, 16> identity_{};

  std::mutex mutex_;
  CUmodule module_ = nullptr;
  std::map<std::pair<Dtype, ReduceOp>, CUfunction> functions_;
  std::map<CUdeviceptr, Allocation> handles_;  // by base
  std::map<uint64_t, int> shareable_;          // descriptors by physical memory
  std::map<CUdeviceptr, uint64_t> mapped_;     // that memory by base
};

}  // namespace

bool has_cuda_kernels() { return cuda_kernels() != nullptr; }

Result<std::unique_ptr<Device>> open_cuda_device(int ordinal) {
  const Result<Api>& driver = api();
  if (!driver) return driver.status();
  auto device = std::make_unique<CudaDevice>(driver.value(), ordinal);
  if (Status opened = device->open(); !opened) return opened;
  return std::unique_ptr<Device>(std::move(device));
}

}  // namespace smddp::device
