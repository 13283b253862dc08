// Devices as torch knows them: which of them this process uses, and their current streams.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "device/host_device.h"
#include "intranode/copy_engine_memory.h"
#include "torch/tensors.h"

namespace smddp {

// One device of this process. Neither it nor the device is ever freed, as streams may be in use until the
// process ends.
class TorchDevice {
 public:
  // True if SMDDP_DEVICE is "host": CPU tensors in memory of host_device() then lie on a device too.
  static bool is_simulated();
  static device::HostDevice& host_device();
  // A tensor in that memory, for tests. Throws unless is_simulated().
  static at::Tensor host_empty(int64_t bytes);
  // For tests: from `begins` on until the next call, the caller's stream there records a graph; its commands.
  static size_t record_host(bool begins);
  // The device that all of these tensors lie on; an error if they lie on several, or if it cannot be used.
  static Result<TorchDevice*> of(TensorRefs tensors);
  // Whether the caller's stream on the tensors' device records a graph.
  static bool records(TensorRefs tensors);
  // True if of() may succeed: no tensor is an ordinary CPU tensor.
  static bool concerns(TensorRefs tensors);

  // The sums over all devices of the process.
  static intranode::Imports::Statistics statistics();

  device::Device& device() { return *device_; }
  intranode::Imports& imports() { return imports_; }
  // A contiguous copy in new memory on this device, ordered after the caller's stream.
  at::Tensor copy_of(const at::Tensor& tensor) const;
  // New memory on this device, free to use from the caller's stream on.
  at::Tensor empty(size_t bytes) const;
  // The stream that the caller's work goes to.
  device::Stream current() const;
  // After it returns, code that reads the tensors sees the results of what was submitted to `stream`.
  void settle(device::Stream stream);
  // Completes a future. Its users wait on their streams for the event `finished`.
  void complete(c10::ivalue::Future& future, const std::vector<at::Tensor>& results,
                device::Event finished);
  std::vector<c10::Device> future_devices() const;
  bool is_host() const { return place_.is_cpu(); }
  c10::Device place() const { return place_; }

 private:
  TorchDevice(c10::Device place, device::Device& device)
      : place_(place), device_(&device), imports_(device) {}
  void recall_what_torch_frees();
  const c10::Device place_;
  device::Device* const device_;
  intranode::Imports imports_;
  device::Stream current_of_host_ = nullptr;
};

}  // namespace smddp
