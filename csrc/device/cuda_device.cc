#include "device/cuda_device.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "common/env.h"
#include "common/log.h"
#include "device/cuda_api.h"
#include "device/cuda_kernels.h"
#include "device/cuda_sharing.h"
#include "device/gdr_flags.h"

namespace smddp::device {
namespace {

using namespace cuda;

constexpr unsigned kThreads = 1024;  // equal to the kernels' launch bounds (2026-11-27-gpu-h200)
// With fewer bytes per block, the start of a block costs more than its work. Not measured.
constexpr size_t kBytesPerBlock = 64 << 10;

CUstream stream_of(Stream stream) { return static_cast<CUstream>(stream); }
CUevent event_of(Event event) { return static_cast<CUevent>(event); }

// While an object of this class lives, calls of this thread that are not stream work, such as mapping
// memory, do not become part of a graph that is being recorded and do not invalidate it.
class Relaxed {
 public:
  explicit Relaxed(const Api& api) : api_(api) { api_.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { api_.cuThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  const Api& api_;
  int mode_ = kCaptureRelaxed;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(const Api& api, int ordinal) : api_(api), ordinal_(ordinal) {}
  ~CudaDevice() override {
    if (context_ == nullptr) return;
    destroy_lanes();
    {
      Inside inside(*this);
      if (module_ != nullptr) api_.cuModuleUnload(module_);
    }
    api_.cuDevicePrimaryCtxRelease(device_);
  }

  Status open() {
    const char* queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (queues != nullptr && std::strcmp(queues, "1") == 0) {
      return {Code::kUnavailable,
              "CUDA_DEVICE_MAX_CONNECTIONS is 1, so all streams of the process share one queue of "
              "the GPU, and kernels would stand behind a collective that waits for another rank; "
              "unset it, or set it to 8 or more"};
    }
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
    sharing_ = std::make_unique<CudaSharing>(api_, device_);
    if (!s) return s;
    Inside inside(*this);
    int least = 0;
    return check(api_.cuCtxGetStreamPriorityRange(&least, &priority_),
                 "cuCtxGetStreamPriorityRange");
  }

  // Of the highest priority: the blocks of a sum begin as blocks of the model's kernels end, and not after all of
  // a kernel's blocks.
  Result<Stream> create_stream() override {
    Aside aside(*this);
    CUstream stream = nullptr;
    Status s = check(api_.cuStreamCreateWithPriority(&stream, kStreamNonBlocking, priority_),
                     "cuStreamCreateWithPriority");
    return s ? Result<Stream>(stream) : Result<Stream>(s);
  }
  void destroy_stream(Stream stream) override {
    if (stream == nullptr) return;
    Aside aside(*this);
    api_.cuStreamDestroy(stream_of(stream));
  }
  Result<Event> create_event() override {
    Inside inside(*this);
    CUevent event = nullptr;
    Status s = check(api_.cuEventCreate(&event, kEventDisableTiming), "cuEventCreate");
    return s ? Result<Event>(event) : Result<Event>(s);
  }
  void destroy_event(Event event) override {
    if (event == nullptr) return;
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
    Aside aside(*this);  // another thread may be recording a graph
    CUresult result = api_.cuEventQuery(event_of(event));
    if (result == kNotReady) return false;
    Status s = check(result, "work on the GPU");
    return s ? Result<bool>(true) : Result<bool>(s);
  }
  Status synchronize(Stream stream) override {
    Aside aside(*this);
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
  Status copies(Stream stream, std::span<const Copy> all) override {
    if (all.empty() || api_.cuMemcpyBatchAsync == nullptr) return one_by_one(stream, all);
    std::vector<CUdeviceptr> to, from;
    std::vector<size_t> bytes;
    for (const Copy& each : all) {
      to.push_back(pointer(each.to));
      from.push_back(pointer(each.from));
      bytes.push_back(each.bytes);
    }
    CUmemcpyAttributes of_all{
        .source_order = kInStreamOrder, .source = {}, .destination = {}, .flags = kBesideCompute};
    size_t first = 0, failed = 0;
    Inside inside(*this);
    CUresult result = api_.cuMemcpyBatchAsync(to.data(), from.data(), bytes.data(), all.size(),
                                              &of_all, &first, 1, &failed, stream_of(stream));
    if (result == kNotSupported) return one_by_one(stream, all);
    return check(result, "cuMemcpyBatchAsync");
  }
  // The addresses are those on the device: see map_host().
  Status flags(Stream stream, std::span<const FlagStep> steps) override {
    if (steps.empty()) return {};
    if (steps.size() > kMostSteps) return {Code::kInternal, "too many steps in one command"};
    std::array<CUstreamBatchMemOpParams, kMostSteps> batch;
    for (size_t i = 0; i < steps.size(); ++i) {
      bool waits = steps[i].kind == FlagStep::Kind::kWait;
      batch[i] = {.operation = waits ? kWaitValue : kWriteValue,
                  .address = pointer(steps[i].flag),
                  .value = steps[i].value,
                  .upper_half = 0,
                  .flags = waits ? wait_flags_ : 0,
                  .others = {}};
    }
    Inside inside(*this);
    return check(api_.cuStreamBatchMemOp(stream_of(stream), static_cast<unsigned>(steps.size()),
                                         batch.data(), 0),
                 "cuStreamBatchMemOp");
  }
  Status together(const std::function<Status()>& submit) override {
    Inside inside(*this);
    return submit();
  }

  bool can_reduce() const override { return cuda_kernels() != nullptr; }
  Status reduce(Stream stream, const kernels::Reduction& reduction) override {
    if (reduction.count == 0) return {};
    auto function = kernel(reduction.dtype, reduction.op);
    if (!function) return function.status();
    Inside inside(*this);
    size_t useful = reduction.count * size_of(reduction.dtype) / kBytesPerBlock + 1;
    auto most = static_cast<size_t>(std::clamp(reduction.blocks, 1, multiprocessors_));
    kernels::Reduction copy = reduction;  // the driver takes a pointer that is not const
    void* parameters[] = {&copy};
    return check(
        api_.cuLaunchKernel(function.value(), static_cast<unsigned>(std::min(useful, most)), 1, 1,
                            kThreads, 1, 1, 0, stream_of(stream), parameters, nullptr),
        "cuLaunchKernel");
  }

  int cuda_ordinal() const override { return ordinal_; }
  Result<void*> allocate(size_t bytes) override {
    Aside aside(*this);
    CUdeviceptr memory = 0;
    Status s = check(api_.cuMemAlloc(&memory, bytes), "cuMemAlloc");
    return s ? Result<void*>(reinterpret_cast<void*>(memory)) : Result<void*>(s);
  }
  void free(void* address) override {
    if (address == nullptr) return;
    Aside aside(*this);
    api_.cuMemFree(pointer(address));
  }

  Result<std::vector<Allocation>> export_memory(const void* address, size_t bytes) override {
    Aside aside(*this);
    return sharing_->export_memory(address, bytes);
  }
  size_t recall(const void* address, size_t bytes) override {
    Aside aside(*this);
    return sharing_->recall(address, bytes);
  }
  Result<void*> import_memory(const Allocation& allocation, int pid) override {
    Aside aside(*this);
    return sharing_->import_memory(allocation, pid);
  }
  void release_memory(const Allocation& allocation, void* address) override {
    Aside aside(*this);
    sharing_->release_memory(allocation, address);
  }

  Result<void*> map_host(void* address, size_t bytes) override {
    Aside aside(*this);
    Status s = check(api_.cuMemHostRegister(address, bytes, kRegisterPortable | kRegisterMapped),
                     "cuMemHostRegister");
    if (!s) return s;
    CUdeviceptr here = 0;
    s = check(api_.cuMemHostGetDevicePointer(&here, address, 0), "cuMemHostGetDevicePointer");
    return s ? Result<void*>(reinterpret_cast<void*>(here)) : Result<void*>(s);
  }
  void unmap_host(void* address) override {
    Aside aside(*this);
    api_.cuMemHostUnregister(address);
  }

  // In the GPU's memory if GDRCopy is chosen, so that a stream that waits reads no host memory.
  Result<std::unique_ptr<HostFlags>> create_flags() override {
    if (env::debug("libgdrapi").empty()) return Device::create_flags();
    auto made = flags_on_gpu(*this);
    if (made) return made;
    log(LogLevel::kWarning, made.status().message() + "; flags are in pinned host memory");
    return Device::create_flags();
  }

 private:
  // While an object of this class lives, the device's context is current in this thread. Within another such
  // object of the device it calls nothing.
  class Inside {
   public:
    explicit Inside(const CudaDevice& device) : device_(device), outer_(current_) {
      if (outer_ != &device_) device_.api_.cuCtxPushCurrent(device_.context_);
      current_ = &device_;
    }
    ~Inside() {
      current_ = outer_;
      if (outer_ == &device_) return;
      CUcontext left = nullptr;
      device_.api_.cuCtxPopCurrent(&left);
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    static inline thread_local const CudaDevice* current_ = nullptr;
    const CudaDevice& device_;
    const CudaDevice* const outer_;
  };
  struct Aside {
    explicit Aside(const CudaDevice& device) : inside(device), relaxed(device.api_) {}
    Inside inside;
    Relaxed relaxed;
  };

  Status check(CUresult result, const char* what) const { return api_.check(result, what); }
  Status attribute(int which, int* value) {
    return check(api_.cuDeviceGetAttribute(value, which, device_), "cuDeviceGetAttribute");
  }
  Result<CUfunction> kernel(Dtype dtype, ReduceOp op) {
    std::lock_guard lock(mutex_);
    auto known = functions_.find({dtype, op});
    if (known != functions_.end()) return known->second;
    const char* name = kernel_name(dtype, op);
    if (name == nullptr || cuda_kernels() == nullptr) {
      return Status(Code::kUnavailable,
                    "this build has no kernels: build on a machine that has nvcc, or set "
                    "SMDDP_DEVICE=off");
    }
    Aside aside(*this);
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
  int multiprocessors_ = 0, priority_ = 0;
  unsigned wait_flags_ = kWaitEqual;

  std::mutex mutex_;
  CUmodule module_ = nullptr;
  std::map<std::pair<Dtype, ReduceOp>, CUfunction> functions_;
  std::unique_ptr<CudaSharing> sharing_;
};

}  // namespace

bool cuda_stream_records(Stream stream) {
  int state = kCaptureNone;
  const Result<Api>& driver = api();
  return driver && driver.value().cuStreamIsCapturing(stream_of(stream), &state) == 0 &&
         state != kCaptureNone;
}

void outside_of_recordings(const std::function<void()>& function) {
  const Result<Api>& driver = api();
  if (!driver) return function();
  Relaxed relaxed(driver.value());
  function();
}

Result<std::unique_ptr<Device>> open_cuda_device(int ordinal) {
  const Result<Api>& driver = api();
  if (!driver) return driver.status();
  auto device = std::make_unique<CudaDevice>(driver.value(), ordinal);
  if (Status opened = device->open(); !opened) return opened;
  return std::unique_ptr<Device>(std::move(device));
}

}  // namespace smddp::device
