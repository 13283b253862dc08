// A process group's collectives on tensors of a device: it checks tensors and makes plans for the copy engines.
// ProcessGroupSMDDP calls it, by way of BoundDevice.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu/device_plan.h"
#include "group/operation_recorder.h"
#include "torch/torch_device.h"

namespace smddp {

// What follows a group's name in the flight recorder for its operations on a device.
inline constexpr const char* kOnDevice = " (device)";

// While it lives, what this thread starts on a device is not counted in the statistics.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
};

// Keeps its tensors alive until a stream waits for it, or the device is done with them, so no tensor has to be
// recorded on a stream.
class DeviceTensorOperation final : public DeviceOperation,
                                    public std::enable_shared_from_this<DeviceTensorOperation> {
 public:
  explicit DeviceTensorOperation(TorchDevice& device);

  std::vector<at::Tensor> results;
  std::vector<at::Tensor> keep;  // everything else that it reads
  const char* way = "";          // the path, for the statistics
  // In the flight recorder, beside that of the exchange on the CPU.
  recorder::Mark on_device;

  // Drops the tensors. To be called once the caller's stream waits for the operation: what that stream does
  // from then on, also in memory that the allocator hands out again, comes after it.
  void drop_tensors();
  c10::intrusive_ptr<c10::ivalue::Future> future(const std::vector<at::Tensor>& values);
  std::exception_ptr exception();  // nullptr unless it failed
  uint64_t made_ns() const { return called_ns_; }
  void waited(double seconds) const;

 private:
  void on_submitted() override;
  void on_closed(const Status& status) override;
  void note_submission();  // under mutex_
  void settle_future(std::unique_lock<std::mutex> lock);

  TorchDevice& device_;
  const uint64_t called_ns_;
  const bool counted_;
  std::mutex mutex_;
  bool complete_ = false, closed_ = false, noted_ = false;
  bool future_taken_ = false;  // a thread completes the future, or has done so
  Status status_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::vector<at::Tensor> for_future_;
};

class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(int rank, c10d::OpType type, TorchDevice& device, std::shared_ptr<DeviceGroup> group,
             std::shared_ptr<DeviceTensorOperation> operation)
      : Work(rank, type),
        device_(device),
        group_(std::move(group)),
        operation_(std::move(operation)),
        results_(operation_->results) {}

  bool isCompleted() override { return group_->closed(*operation_); }
  bool isSuccess() const override {
    return group_->closed(*operation_) && operation_->exception() == nullptr;
  }
  std::exception_ptr exception() const override { return operation_->exception(); }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override { wait(kNoTimeout); }
  // Makes the caller's stream wait. Blocks the host only until all ranks of the host have made the call.
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return operation_->future(results_);
  }
  uint64_t getSequencenumber() const override { return operation_->number(); }

 private:
  TorchDevice& device_;
  std::shared_ptr<DeviceGroup> group_;
  std::shared_ptr<DeviceTensorOperation> operation_;
  const std::vector<at::Tensor> results_;
};

// The collectives of one group on one device. Made by a call of all ranks of the group.
class DeviceCollectives {
 public:
  // An error is the same on all ranks.
  static Result<std::unique_ptr<DeviceCollectives>> create(Process& process, Group& group,
                                                           Store& store,
                                                           Result<TorchDevice*> device,
                                                           std::chrono::milliseconds timeout);
  ~DeviceCollectives();

  // Arguments as ProcessGroupSMDDP's: `list` says that the larger side has a tensor per rank.
  c10::intrusive_ptr<c10d::Work> gather(TensorRefs outputs, TensorRefs inputs, bool list,
                                        std::chrono::milliseconds timeout, c10d::OpType type,
                                        bool async);
  c10::intrusive_ptr<c10d::Work> scatter(TensorRefs outputs, TensorRefs inputs, bool list,
                                         ReduceOp op, std::chrono::milliseconds timeout,
                                         c10d::OpType type, bool async);
  c10::intrusive_ptr<c10d::Work> reduce(TensorRefs tensors, ReduceOp op,
                                        std::chrono::milliseconds timeout, c10d::OpType type,
                                        bool async);

  TorchDevice& device() const { return device_; }
  DeviceGroup& group() { return *group_; }
  int rank() const { return rank_; }
  int ranks() const { return static_cast<int>(ranks_); }
  // Whether a graph can hold the collective: it passes through no CPU.
  bool can_be_recorded(Collective collective) const {
    return device_way(place(), collective != Collective::kAllGather) == DeviceWay::kHost;
  }
  // The path of a collective by the settings as they are now.
  const char* way(Collective collective) const {
    return name_of_way(place(), collective != Collective::kAllGather);
  }

 private:
  using OperationPtr = std::shared_ptr<DeviceTensorOperation>;
  DeviceCollectives(TorchDevice& device, Group& ranks, Store& store)
      : device_(device),
        ranks_of_(ranks),
        store_(store),
        recorder_(ranks.name() + kOnDevice),
        rank_(ranks.rank()),
        ranks_(static_cast<size_t>(ranks.ranks())) {}
  // By the settings as they are now.
  DevicePlace place() const;
  OperationPtr begin(Collective collective, ReduceOp op, TensorRefs tensors,
                     std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Work> submit(OperationPtr op, c10d::OpType type, bool async);

  TorchDevice& device_;
  Group& ranks_of_;
  Store& store_;
  const OperationRecorder recorder_;
  std::atomic<uint64_t> called_{0};  // operations
  const int rank_;
  const size_t ranks_;
  device::Stream stream_ = nullptr;
  std::shared_ptr<DeviceGroup> group_;
};

}  // namespace smddp
