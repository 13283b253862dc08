// The group that carries what smddp does not own: Gloo for CPU tensors, NCCL for CUDA tensors. Made
// on first need, logged once per operation, counted always.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "torch/tensors.h"

namespace smddp {

class Fallback {
 public:
  using Factory = std::function<c10::intrusive_ptr<c10d::Backend>(const std::string& device_type)>;

  Fallback(std::string group, Factory factory)
      : group_(std::move(group)), factory_(std::move(factory)) {}

  // The backend for tensors on `device`, after counting `operation` with `bytes`. `reason` says why
  // it is not smddp's. Throws where the settings forbid fallbacks.
  c10d::Backend& take(const char* operation, c10::DeviceType device, uint64_t bytes,
                      const char* reason);
  // The one for `device` if it was ever needed.
  c10d::Backend* existing(c10::DeviceType device);
  // Notes a work that the fallback carries out.
  static void note(const c10::intrusive_ptr<c10d::Work>& work);
  // For the end of the process, without the GIL: gives the fallback's threads a moment to let go of
  // what is done. One that drops the last reference to a tensor after the interpreter is gone ends the
  // process with std::terminate, in Gloo alone as well.
  static void settle();
  void set_timeout(std::chrono::milliseconds timeout);
  void abort();
  void shutdown();

 private:
  c10d::Backend& backend(c10::DeviceType device);

  std::string group_;
  Factory factory_;
  std::mutex mutex_;
  std::map<c10::DeviceType, c10::intrusive_ptr<c10d::Backend>> backends_;
};

// Bytes of all tensors.
uint64_t bytes_of(TensorRefs tensors);

}  // namespace smddp
