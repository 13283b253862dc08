// A stub of libcuda.so.1, for tests of the code that calls NVIDIA's driver. Memory is memfd segments,
// streams are those of a HostDevice, and the CPU runs the kernels. The stub checks the arguments of the
// calls. Each context has a HostDevice of its own, as if it were that of a process, so ranks that are threads
// share no hardware queues.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "device/cuda_api.h"
#include "device/cuda_kernels.h"
#include "device/host_device.h"

#define STUB extern "C" __attribute__((visibility("default")))

STUB void* stub_allocate(size_t bytes, int kind, void* at);
STUB void stub_free(void* at);

namespace smddp::device::cuda {
namespace {

constexpr CUresult kInvalidValue = 1, kInvalidContext = 201, kNotFound = 500, kNoSystem = 800;
constexpr int kHighestPriority = -5;

struct Memory {
  size_t bytes;
  int descriptor;
  uint64_t id;
  bool legacy;
  int handle_types;
};

std::mutex mutex;
std::map<CUdeviceptr, Memory> memory;  // allocations of this process
std::map<CUdeviceptr, size_t> mapped;  // mappings of peers' memory
std::map<void*, size_t> pinned;
std::atomic<uint64_t> next_id{1};
thread_local std::vector<HostDevice*> current;  // contexts
thread_local int capture_mode = 0;
std::atomic<bool> no_batches{false}, older{false};

HostDevice& host() { return *current.back(); }

CUresult result(const Status& status) { return status ? kSuccess : kInvalidValue; }
const Memory* find(CUdeviceptr at, CUdeviceptr* base) {
  auto next = memory.upper_bound(at);
  if (next == memory.begin()) return nullptr;
  --next;
  *base = next->first;
  return at < next->first + next->second.bytes ? &next->second : nullptr;
}
bool inside() { return !current.empty(); }
// In any other mode these calls invalidate a graph that another thread records.
bool relaxed() { return capture_mode == kCaptureRelaxed; }
std::atomic<int> strict_calls{0};
CUresult must_be_relaxed() {
  if (relaxed()) return kSuccess;
  ++strict_calls;
  return 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
}

// Counts the calls of a function.
template <auto kFunction>
struct Counted;
template <class... A, CUresult (*kFunction)(A...)>
struct Counted<kFunction> {
  static inline std::atomic<int> calls{0};
  static CUresult call(A... arguments) {
    ++calls;
    return kFunction(arguments...);
  }
};

struct Entry {
  void* function;
  std::atomic<int>* calls;
};
std::map<std::string, Entry>& entries() {
  static std::map<std::string, Entry> all;
  return all;
}
template <auto kGiven, class F>
bool add(const char* name, F right) {
  right = &Counted<kGiven>::call;  // has the right type
  entries()[name] = {reinterpret_cast<void*>(right), &Counted<kGiven>::calls};
  return true;
}
// Defines a function of the driver. Its type is that which Api has of it.
#define DRIVER(name, ...)                                                         \
  CUresult stub_##name(__VA_ARGS__);                                              \
  const bool has_##name = add<&stub_##name>(#name, decltype(Api::name)(nullptr)); \
  CUresult stub_##name(__VA_ARGS__)

template <class T>
CUresult put(T* to, std::type_identity_t<T> value) {
  *to = value;
  return kSuccess;
}

DRIVER(cuInit, unsigned) { return kSuccess; }
DRIVER(cuGetErrorName, CUresult error, const char** name) {
  return put(name, error == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OF_THE_STUB");
}
DRIVER(cuGetErrorString, CUresult, const char** text) {
  return put(text, "error text of the stub");
}
DRIVER(cuDriverGetVersion, int* version) { return put(version, kVersion); }
DRIVER(cuDeviceGetCount, int* count) { return put(count, 1); }
DRIVER(cuDeviceCanAccessPeer, int* can, CUdevice, CUdevice) { return put(can, 1); }
DRIVER(cuDeviceGet, CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? kSuccess : 101;
}
DRIVER(cuDeviceGetName, char* name, int bytes, CUdevice) {
  std::strncpy(name, "stub", static_cast<size_t>(bytes));
  return kSuccess;
}
DRIVER(cuDeviceGetAttribute, int* value, int which, CUdevice) {
  return put(value, which == kMultiprocessorCount ? 6 : 1);
}
DRIVER(cuDevicePrimaryCtxRetain, CUcontext* context, CUdevice) {
  static auto* all = new std::vector<HostDevice*>();
  std::lock_guard lock(mutex);
  all->push_back(new HostDevice());
  *context = reinterpret_cast<CUcontext>(all->back());
  return kSuccess;
}
DRIVER(cuDevicePrimaryCtxRelease, CUdevice) { return kSuccess; }
DRIVER(cuCtxPushCurrent, CUcontext context) {
  if (context == nullptr) return kInvalidContext;
  current.push_back(reinterpret_cast<HostDevice*>(context));
  return kSuccess;
}
DRIVER(cuCtxPopCurrent, CUcontext*) {
  current.pop_back();
  return kSuccess;
}
DRIVER(cuCtxSynchronize) { return must_be_relaxed(); }
DRIVER(cuCtxGetStreamPriorityRange, int* least, int* greatest) {
  *least = 0;
  *greatest = kHighestPriority;
  return inside() ? kSuccess : kInvalidContext;
}
DRIVER(cuStreamCreateWithPriority, CUstream* stream, unsigned flags, int priority) {
  if (!inside() || flags != kStreamNonBlocking || priority != kHighestPriority)
    return kInvalidContext;
  *stream = static_cast<CUstream>(host().create_stream().value());
  return kSuccess;
}
DRIVER(cuStreamDestroy, CUstream stream) {
  host().destroy_stream(stream);
  return kSuccess;
}
DRIVER(cuStreamSynchronize, CUstream stream) {
  if (must_be_relaxed() != kSuccess) return 900;
  return result(host().synchronize(stream));
}
DRIVER(cuStreamIsCapturing, CUstream, int* state) { return put(state, kCaptureNone); }
DRIVER(cuStreamWaitEvent, CUstream stream, CUevent event, unsigned flags) {
  return flags == 0 && inside() ? result(host().wait(stream, event)) : kInvalidValue;
}
bool is_pinned(CUdeviceptr at) {
  std::lock_guard lock(mutex);
  auto next = pinned.upper_bound(reinterpret_cast<void*>(at));
  if (next == pinned.begin()) return false;
  --next;
  return at < reinterpret_cast<CUdeviceptr>(next->first) + next->second;
}
bool is_on_gpu(CUdeviceptr at) {
  std::lock_guard lock(mutex);
  CUdeviceptr base = 0;
  return find(at, &base) != nullptr;
}
DRIVER(cuStreamBatchMemOp, CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations,
       unsigned flags) {
  if (count == 0 || count >= 256 || flags != 0 || !inside()) return kInvalidValue;
  std::vector<FlagStep> steps;
  for (const CUstreamBatchMemOpParams& o : std::span(operations, count)) {
    bool waits = o.operation == kWaitValue;
    bool right = waits ? (is_pinned(o.address) || is_on_gpu(o.address)) &&
                             o.flags == (kWaitEqual | kWaitFlush)
                       : o.operation == kWriteValue && is_pinned(o.address) && o.flags == 0;
    if (!right) return kInvalidValue;
    steps.push_back({waits ? FlagStep::Kind::kWait : FlagStep::Kind::kWrite,
                     reinterpret_cast<uint32_t*>(o.address), o.value});
  }
  return result(host().flags(stream, steps));
}
DRIVER(cuThreadExchangeStreamCaptureMode, int* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}
DRIVER(cuEventCreate, CUevent* event, unsigned flags) {
  if (flags != kEventDisableTiming) return kInvalidValue;
  *event = static_cast<CUevent>(host().create_event().value());
  return kSuccess;
}
DRIVER(cuEventDestroy, CUevent event) {
  host().destroy_event(event);
  return kSuccess;
}
DRIVER(cuEventRecord, CUevent event, CUstream stream) {
  return result(host().record(event, stream));
}
DRIVER(cuEventQuery, CUevent event) {
  if (must_be_relaxed() != kSuccess) return 900;
  return host().done(event).value() ? kSuccess : kNotReady;
}
DRIVER(cuMemcpyAsync, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return result(
      host().copy(stream, reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes));
}
// As drivers of CUDA 12.8 and newer have it.
DRIVER(cuMemcpyBatchAsync, CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count,
       CUmemcpyAttributes* attributes, size_t* firsts, size_t attributes_count, size_t* failed,
       CUstream stream) {
  bool right = inside() && count > 0 && attributes_count == 1 && firsts[0] == 0 &&
               failed != nullptr && stream != nullptr &&
               attributes->source_order == kInStreamOrder && attributes->flags <= kBesideCompute;
  if (!right) return kInvalidValue;
  if (no_batches) return kNotSupported;
  std::vector<Device::Copy> all;
  for (size_t i = 0; i < count; ++i) {
    if (bytes[i] == 0) return kInvalidValue;
    all.push_back({reinterpret_cast<void*>(to[i]), reinterpret_cast<void*>(from[i]), bytes[i]});
  }
  return result(host().copies(stream, all));
}
DRIVER(cuMemAlloc, CUdeviceptr* at, size_t bytes) {
  if (must_be_relaxed() != kSuccess) return 900;
  *at = reinterpret_cast<CUdeviceptr>(stub_allocate(bytes, 0, nullptr));
  return inside() ? kSuccess : kInvalidContext;
}
DRIVER(cuMemFree, CUdeviceptr at) {
  if (must_be_relaxed() != kSuccess) return 900;
  stub_free(reinterpret_cast<void*>(at));
  return inside() ? kSuccess : kInvalidContext;
}
DRIVER(cuMemHostRegister, void* address, size_t bytes, unsigned flags) {
  if (flags != (kRegisterPortable | kRegisterMapped) || bytes % 4096 != 0) return kInvalidValue;
  std::lock_guard lock(mutex);
  return pinned.emplace(address, bytes).second ? kSuccess : 712;
}
DRIVER(cuMemHostUnregister, void* address) {
  if (must_be_relaxed() != kSuccess) return 900;
  std::lock_guard lock(mutex);
  return pinned.erase(address) == 1 ? kSuccess : kInvalidValue;
}
DRIVER(cuMemHostGetDevicePointer, CUdeviceptr* here, void* address, unsigned) {
  return put(here, reinterpret_cast<CUdeviceptr>(address));
}
DRIVER(cuMemGetAddressRange, CUdeviceptr* base, size_t* bytes, CUdeviceptr at) {
  std::lock_guard lock(mutex);
  const Memory* m = find(at, base);
  if (m == nullptr) return kInvalidValue;
  *bytes = m->bytes;
  return kSuccess;
}
DRIVER(cuPointerGetAttribute, void* to, int which, CUdeviceptr at) {
  std::lock_guard lock(mutex);
  CUdeviceptr base = 0;
  const Memory* m = find(at, &base);
  if (m == nullptr || !inside()) return kInvalidValue;
  auto put = [&](auto value) { std::memcpy(to, &value, sizeof value); };
  if (which == kIpcCapable) put(m->legacy ? 1 : 0);
  if (which == kBufferId || which == kMemoryBlockId) put(m->id);
  if (which == kAllowedHandleTypes) put(static_cast<uint64_t>(m->handle_types));
  if (which == kMappingBase) put(base);
  if (which == kMappingSize) put(m->bytes);
  return kSuccess;
}

struct Handle {
  int pid, descriptor;
  size_t bytes;
};

DRIVER(cuIpcGetMemHandle, CUipcMemHandle* handle, CUdeviceptr at) {
  std::lock_guard lock(mutex);
  CUdeviceptr base = 0;
  const Memory* m = find(at, &base);
  if (m == nullptr || base != at || !m->legacy) return kInvalidValue;
  Handle h{getpid(), m->descriptor, m->bytes};
  std::memcpy(handle->reserved, &h, sizeof h);
  return kSuccess;
}
DRIVER(cuIpcOpenMemHandle, CUdeviceptr* base, CUipcMemHandle handle, unsigned flags) {
  Handle h;
  std::memcpy(&h, handle.reserved, sizeof h);
  if (flags != kLazyPeerAccess || capture_mode != kCaptureRelaxed) return kInvalidValue;
  Allocation a;
  a.bytes = h.bytes;
  a.descriptor = h.descriptor;
  auto at = host().import_memory(a, h.pid);
  if (!at) return kNoSystem;
  *base = reinterpret_cast<CUdeviceptr>(at.value());
  std::lock_guard lock(mutex);
  mapped[*base] = h.bytes;
  return kSuccess;
}
DRIVER(cuIpcCloseMemHandle, CUdeviceptr base) {
  std::lock_guard lock(mutex);
  auto found = mapped.find(base);
  if (found == mapped.end()) return kInvalidValue;
  munmap(reinterpret_cast<void*>(base), found->second);
  mapped.erase(found);
  return kSuccess;
}
DRIVER(cuMemRetainAllocationHandle, CUmemGenericAllocationHandle* handle, void* at) {
  std::lock_guard lock(mutex);
  CUdeviceptr base = 0;
  const Memory* m = find(reinterpret_cast<CUdeviceptr>(at), &base);
  if (m == nullptr || m->legacy) return kInvalidValue;
  *handle = static_cast<CUmemGenericAllocationHandle>(dup(m->descriptor));
  return kSuccess;
}
DRIVER(cuMemExportToShareableHandle, void* to, CUmemGenericAllocationHandle handle, int type,
       unsigned long long) {
  int descriptor = dup(static_cast<int>(handle));
  std::memcpy(to, &descriptor, sizeof descriptor);
  return type == kPosixDescriptor ? kSuccess : kInvalidValue;
}
DRIVER(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle* handle, void* shared,
       int type) {
  int descriptor = static_cast<int>(reinterpret_cast<intptr_t>(shared));
  *handle = static_cast<CUmemGenericAllocationHandle>(dup(descriptor));
  return type == kPosixDescriptor ? kSuccess : kInvalidValue;
}
DRIVER(cuMemRelease, CUmemGenericAllocationHandle handle) {
  return close(static_cast<int>(handle)) == 0 ? kSuccess : kInvalidValue;
}
DRIVER(cuMemAddressReserve, CUdeviceptr* base, size_t bytes, size_t, CUdeviceptr,
       unsigned long long) {
  void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *base = reinterpret_cast<CUdeviceptr>(at);
  return at != MAP_FAILED ? kSuccess : 2;
}
DRIVER(cuMemAddressFree, CUdeviceptr base, size_t bytes) {
  return munmap(reinterpret_cast<void*>(base), bytes) == 0 ? kSuccess : kInvalidValue;
}
DRIVER(cuMemMap, CUdeviceptr base, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
       unsigned long long) {
  void* at = mmap(reinterpret_cast<void*>(base), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                  static_cast<int>(handle), 0);
  std::lock_guard lock(mutex);
  mapped[base] = bytes;
  return at != MAP_FAILED ? kSuccess : kInvalidValue;
}
DRIVER(cuMemUnmap, CUdeviceptr base, size_t) {
  std::lock_guard lock(mutex);
  return mapped.erase(base) == 1 ? kSuccess : kInvalidValue;
}
DRIVER(cuMemSetAccess, CUdeviceptr base, size_t bytes, const CUmemAccessDesc* access,
       size_t count) {
  if (count != 1 || access->location.type != kLocationDevice || access->flags != kReadWrite)
    return kInvalidValue;
  return mprotect(reinterpret_cast<void*>(base), bytes, PROT_READ | PROT_WRITE) == 0
             ? kSuccess
             : kInvalidValue;
}
DRIVER(cuModuleLoadData, CUmodule* module, const void* image) {
  *module = reinterpret_cast<CUmodule>(32);
  return image != nullptr && inside() ? kSuccess : 209;
}
DRIVER(cuModuleUnload, CUmodule) { return kSuccess; }
DRIVER(cuModuleGetFunction, CUfunction* function, CUmodule module, const char* name) {
  static std::set<std::string> names;
  std::lock_guard lock(mutex);
  const std::string& kept = *names.emplace(name).first;
  *function = reinterpret_cast<CUfunction>(const_cast<std::string*>(&kept));
  return module == reinterpret_cast<CUmodule>(32) ? kSuccess : kNotFound;
}
DRIVER(cuLaunchKernel, CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads,
       unsigned ty, unsigned tz, unsigned shared, CUstream stream, void** parameters,
       void** extra) {
  kernels::Reduction r;
  std::memcpy(&r, parameters[0], sizeof r);
  bool right = y * z * ty * tz == 1 && shared == 0 && extra == nullptr && threads == 1024 &&
               static_cast<int>(x) <= r.blocks && x >= 1 &&
               *reinterpret_cast<const std::string*>(function) == kernel_name(r.dtype, r.op);
  r.blocks = static_cast<int>(x);
  return right ? result(host().reduce(stream, r)) : kInvalidValue;
}

}  // namespace
}  // namespace smddp::device::cuda

using namespace smddp::device::cuda;

STUB CUresult cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t,
                                  int* found) {
  *found = 1;
  *function = nullptr;
  bool newer = std::string(name) == "cuMemcpyBatchAsync";
  if (version != (newer ? kNewerVersion : kVersion)) return kInvalidValue;
  if (newer && older) return kNotFound;
  auto entry = entries().find(name);
  if (entry == entries().end()) return kNotFound;
  *found = 0;
  return put(function, entry->second.function);
}

// Allocates memory as torch's allocators do. Kind 0: as cudaMalloc(). Kind 1: as an expandable segment.
// Other kinds can't be shared. `at`: the address, or nullptr for any.
STUB void* stub_allocate(size_t bytes, int kind, void* at) {
  bytes = (bytes + 4095) / 4096 * 4096;
  int descriptor = memfd_create("stub-cuda", MFD_CLOEXEC);
  // With the page behind it, in which HostDevice counts mappings.
  if (ftruncate(descriptor, static_cast<off_t>(bytes + 4096)) != 0) return nullptr;
  at = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (at != nullptr ? MAP_FIXED : 0),
            descriptor, 0);
  std::lock_guard lock(mutex);
  memory[reinterpret_cast<CUdeviceptr>(at)] = {bytes, descriptor, next_id++, kind == 0,
                                               kind == 1 ? kPosixDescriptor : 0};
  return at;
}
STUB void stub_free(void* at) {
  std::lock_guard lock(mutex);
  auto found = memory.find(reinterpret_cast<CUdeviceptr>(at));
  munmap(at, found->second.bytes);
  close(found->second.descriptor);
  memory.erase(found);
}
// The number of calls of the driver's function `name`.
STUB int stub_calls(const char* name) { return *entries().at(name).calls; }
// A driver older than CUDA 12.8, for those that load it from now on; one that refuses batches of copies.
STUB void stub_be_older(bool yes) { older = yes; }
STUB void stub_refuse_batches(bool yes) { no_batches = yes; }
// The number of calls in a mode in which they would have invalidated a recording.
STUB int stub_strict_calls() { return strict_calls; }
// The number of open mappings of peers' memory.
STUB size_t stub_mapped() {
  std::lock_guard lock(mutex);
  return mapped.size();
}
