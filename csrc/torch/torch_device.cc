#include "torch/torch_device.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "common/env.h"
#include "common/log.h"
#include "device/cuda_device.h"
#include "device/cuda_kernels.h"
#include "torch/allocator_trace.h"
#include "torch/runtime.h"

namespace smddp {
namespace {

enum class Use { kAuto, kHost, kOff };

// Read once, so that all groups of the process use the same device.
Use use() {
  static const Use chosen = [] {
    std::string text = env::get("DEVICE");
    require(text == "auto" || text == "host" || text == "off", [&] {
      return "SMDDP_DEVICE is \"" + text + "\"; it may be \"auto\", \"host\" or \"off\"";
    });
    return text == "host" ? Use::kHost : text == "off" ? Use::kOff : Use::kAuto;
  }();
  return chosen;
}

constexpr char kStillMapped[] =
    "smddp: GPU memory is not freed, as a process of this host has mapped it and does not answer; "
    "what CUDA does with such memory is not defined";

struct Known {
  std::mutex mutex;
  std::map<int, Result<TorchDevice*>> by_index;  // -1: the device that threads simulate
};

Known& known() {
  static auto* all = new Known();
  return *all;
}

bool of_host_device(const at::Tensor& t) {
  return t.is_cpu() && TorchDevice::is_simulated() &&
         TorchDevice::host_device().owns(t.const_data_ptr(), t.nbytes());
}

}  // namespace

bool TorchDevice::is_simulated() { return use() == Use::kHost; }

device::HostDevice& TorchDevice::host_device() {
  static auto* device = new device::HostDevice();
  return *device;
}

at::Tensor TorchDevice::host_empty(int64_t bytes) {
  require(is_simulated(), "memory of the host device needs SMDDP_DEVICE=host");
  auto memory = host_device().allocate(static_cast<size_t>(bytes));
  if (!memory) throw_status(memory.status());
  return at::from_blob(
      memory.value(), {bytes},
      [bytes](void* at) {
        if (host_device().recall(at, static_cast<size_t>(bytes)) == 0)
          return host_device().free(at);
        log(LogLevel::kWarning, kStillMapped);
      },
      at::TensorOptions(at::kByte));
}

size_t TorchDevice::record_host(bool begins) {
  at::Tensor there = host_empty(1);
  device::Stream stream = of(&there).value()->current();
  if (begins) {
    if (Status s = host_device().begin_recording(stream); !s) throw_status(s);
    return 0;
  }
  auto graph = host_device().end_recording(stream);
  if (!graph) throw_status(graph.status());
  return graph.value()->size();
}

bool TorchDevice::concerns(TensorRefs tensors) {
  if (use() == Use::kOff || tensors.empty()) return false;
  for (const at::Tensor* t : tensors) {
    // An empty tensor has no memory, so any device can carry it.
    if (!t->is_cuda() && !of_host_device(*t) && !(t->is_cpu() && t->numel() == 0)) return false;
  }
  return tensors[0]->is_cuda() || is_simulated();
}

bool TorchDevice::records(TensorRefs tensors) {
  if (tensors.empty()) return false;
  c10::Device place = tensors[0]->device();
  if (place.is_cuda()) {
    c10::Stream stream = c10::impl::VirtualGuardImpl(place.type()).getStream(place);
    return device::cuda_stream_records(stream.native_handle());
  }
  if (!of_host_device(*tensors[0])) return false;
  auto recording = host_device().capturing(of(tensors).value()->current());
  return recording && recording.value();
}

Result<TorchDevice*> TorchDevice::of(TensorRefs tensors) {
  c10::Device place = tensors[0]->device();
  for (const at::Tensor* t : tensors) {
    if (t->device() != place)
      return Status(Code::kUnavailable, "the tensors lie on several devices");
  }
  int index = place.is_cpu() ? -1 : place.index();
  std::lock_guard lock(known().mutex);
  auto found = known().by_index.find(index);
  if (found != known().by_index.end()) return found->second;
  Result<TorchDevice*> made = Status(Code::kUnavailable, "");
  if (place.is_cpu()) {
    auto* torch_device = new TorchDevice(place, host_device());
    torch_device->current_of_host_ = torch_device->device().create_stream().value();
    made = torch_device;
  } else if (device::cuda_kernels() == nullptr && !settings().reduce_on_cpu) {
    made = Status(
        Code::kUnavailable,
        "this build has no kernels for GPUs; build it where nvcc is, or set reduce_on to cpu");
  } else {
    auto gpu = device::open_cuda_device(index);
    made = gpu ? Result<TorchDevice*>(new TorchDevice(place, *gpu.value().release()))
               : Result<TorchDevice*>(gpu.status());
    if (made) made.value()->recall_what_torch_frees();
  }
  return known().by_index.emplace(index, made).first->second;
}

// torch's own memory returns to the GPU at empty_cache(), or when an allocation has failed, before it tries again.
void TorchDevice::recall_what_torch_frees() {
  Status followed = follow_gpu_allocator(place_.index(), [this](const void* at, size_t bytes) {
    return device_->recall(at, bytes) == 0 ? nullptr : kStillMapped;
  });
  if (!followed)
    log(LogLevel::kInfo,
        "freed GPU memory stays with the peers until its addresses are used again: " +
            followed.message());
}

intranode::Imports::Statistics TorchDevice::statistics() {
  intranode::Imports::Statistics sum;
  std::lock_guard lock(known().mutex);
  for (auto& [index, device] : known().by_index) {
    if (!device) continue;
    auto s = device.value()->imports_.statistics();
    sum.hits += s.hits;
    sum.misses += s.misses;
    sum.replaced += s.replaced;
    sum.mapped += s.mapped;
  }
  return sum;
}

at::Tensor TorchDevice::copy_of(const at::Tensor& tensor) const {
  at::Tensor copy;
  if (is_host()) {
    at::Tensor memory = host_empty(std::max<int64_t>(static_cast<int64_t>(tensor.nbytes()), 1));
    void* at = memory.mutable_data_ptr();
    copy = at::from_blob(at, tensor.sizes(), [memory](void*) {}, tensor.options());
  } else {
    copy = at::empty(tensor.sizes(), tensor.options());
  }
  return copy.copy_(tensor.detach());
}

at::Tensor TorchDevice::empty(size_t bytes) const {
  auto size = static_cast<int64_t>(std::max<size_t>(bytes, 1));
  return is_host() ? host_empty(size) : at::empty({size}, at::device(place_).dtype(at::kByte));
}

device::Stream TorchDevice::current() const {
  if (is_host()) return current_of_host_;
  return c10::impl::VirtualGuardImpl(place_.type()).getStream(place_).native_handle();
}

// Code that reads CPU tensors does not wait for streams.
void TorchDevice::settle(device::Stream stream) {
  if (!is_host()) return;
  if (Status s = device_->synchronize(stream); !s) throw_status(s);
}

std::vector<c10::Device> TorchDevice::future_devices() const {
  return is_host() ? std::vector<c10::Device>{} : std::vector<c10::Device>{place_};
}

void TorchDevice::complete(c10::ivalue::Future& future, const std::vector<at::Tensor>& results,
                           device::Event finished) {
  if (is_host()) return future.markCompleted(c10::IValue(results));
  // The future records an event on the current stream. So that stream must wait for nothing but this
  // operation.
  c10::Stream stream = c10::impl::VirtualGuardImpl(place_.type()).getStreamFromGlobalPool(place_);
  Status waited = device_->wait(stream.native_handle(), finished);
  c10::StreamGuard current(stream);
  if (waited) {
    future.markCompleted(c10::IValue(results));
  } else {
    future.setErrorIfNeeded(std::make_exception_ptr(std::runtime_error(waited.message())));
  }
}

}  // namespace smddp
