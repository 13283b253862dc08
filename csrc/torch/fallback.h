// The group that carries collectives that smddp does not own: Gloo for CPU tensors, NCCL for CUDA tensors.
// Made when first needed; each operation is logged once and counted always.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "recorder/flight_recorder.h"
#include "torch/tensors.h"

namespace smddp {

class Fallback {
 public:
  // `rendezvous` names the one that made the group, for keys in a store that earlier ranks have used. `address`: at
  // which the group's ranks reach this host; "": not known.
  using Factory = std::function<c10::intrusive_ptr<c10d::Backend>(
      const std::string& device_type, const std::string& rendezvous, const std::string& address)>;
  using Address = std::function<std::string()>;

  Fallback(std::string group, std::string rendezvous, Factory factory, Address address);

  // Counts `operation`, and returns the backend for such tensors. `reason`: why smddp does not carry it. Throws
  // if the settings forbid fallbacks, unless the reason is kRouted. NCCL is connected before it is recorded in a
  // graph.
  c10d::Backend& take(const char* operation, TensorRefs tensors, const char* reason);
  // Connects NCCL on this GPU, unless it has carried a collective: a call of all ranks.
  void connect(c10::Device gpu);
  // Made at the first call.
  c10d::Backend& backend(c10::DeviceType device);
  // Whether every form of call on such tensors works there: else what the user routes away stays smddp's.
  static bool takes(TensorRefs tensors, const c10d::ReduceOp* op);
  // Notes the work of the operation that this thread took last, for settle() and the flight recorder; returns
  // the one for the caller.
  static c10::intrusive_ptr<c10d::Work> note(c10::intrusive_ptr<c10d::Work> work);
  // Lets the flight recorder know of works that are complete.
  static void look_at_works();
  // For the end of the process; called without the GIL. Gives the fallback's threads at most half a second
  // to release works that are complete. A thread that drops the last reference to a tensor after the interpreter
  // is gone ends the process with std::terminate; this happens with Gloo alone as well.
  static void settle();
  void set_timeout(std::chrono::milliseconds timeout);
  void abort();
  void shutdown();

 private:
  std::string group_;
  std::string rendezvous_;
  recorder::Text recorded_group_;
  std::atomic<uint64_t> collectives_{0};
  std::atomic<bool> connected_{false};  // NCCL, among all ranks
  Factory factory_;
  Address address_;
  std::mutex mutex_;
  std::map<c10::DeviceType, c10::intrusive_ptr<c10d::Backend>> backends_;
};

// Bytes of all tensors.
uint64_t bytes_of(TensorRefs tensors);

}  // namespace smddp
