// Devices as torch knows them: which of them this process uses, and their current streams.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "device/host_device.h"
#include "intranode/copy_engine_memory.h"
#include "torch/tensors.h"

namespace smddp {

// One device of this process; neither it nor the device is ever freed, as streams may be in use until
// the process ends.
class TorchDevice {
 public:
  // Where SMDDP_DEVICE is "host", CPU tensors in memory of host_device() lie on a device too.
  static bool plays_host();
  static device::HostDevice& host_device();
  // A tensor in that memory, for tests. Throws unless plays_host().
  static at::Tensor host_empty(int64_t bytes);
  // The device that all of these lie on, if they do and it can be used; else why not.
  static Result<TorchDevice*> of(TensorRefs tensors);
  // True where of() is worth a try: no tensor is an ordinary CPU tensor.
  static bool concerns(TensorRefs tensors);

  // Of all devices of the process together.
  static intranode::Imports::Statistics statistics();

  device::Device& device() { return *device_; }
  intranode::Imports& imports() { return imports_; }
  // Its values, end to end, in memory of its own on this device, as of the caller's stream.
  at::Tensor copy_of(const at::Tensor& tensor) const;
  // Memory on this device, of nobody else as of the caller's stream.
  at::Tensor empty(size_t bytes) const;
  // The stream that the caller's work goes to.
  device::Stream current() const;
  // What is submitted to current() is done, as far as code that reads the tensors can tell.
  void settle(device::Stream stream);
  // Completes a future whose users wait, on their streams, for `finished`.
  void complete(c10::ivalue::Future& future, const std::vector<at::Tensor>& results,
                device::Event finished);
  std::vector<c10::Device> future_devices() const;
  bool is_host() const { return place_.is_cpu(); }

 private:
  TorchDevice(c10::Device place, device::Device& device)
      : place_(place), device_(&device), imports_(device) {}
  const c10::Device place_;
  device::Device* const device_;
  intranode::Imports imports_;
  device::Stream current_of_host_ = nullptr;
};

}  // namespace smddp
