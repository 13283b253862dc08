// A collective as torch sees it: the operation with the tensors it keeps alive, its future, its
// Work.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "collectives/communicator.h"

namespace smddp {

class TensorOperation final : public Operation {
 public:
  TensorOperation();

  std::vector<at::Tensor> results;  // what the caller gets
  std::vector<at::Tensor> keep;     // everything else the operation reads or writes
  // Contiguous stand-ins: copied to the caller's tensors at the end.
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_back;  // (to, from)
  std::vector<std::byte> scratch;                            // a barrier's bytes
  c10::intrusive_ptr<c10::ivalue::Future> future;
  uint64_t started_ns = 0;

  std::exception_ptr exception() const;

 protected:
  void on_done() override;
};

class WorkSMDDP final : public c10d::Work {
 public:
  WorkSMDDP(int rank, c10d::OpType type, Engine& engine, std::shared_ptr<TensorOperation> operation)
      : Work(rank, type), engine_(engine), operation_(std::move(operation)) {}

  bool isCompleted() override { return operation_->done(); }
  bool isSuccess() const override { return operation_->done() && operation_->status().ok(); }
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return operation_->results; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return operation_->future; }
  uint64_t getSequencenumber() const override { return operation_->number(); }

 private:
  Engine& engine_;
  std::shared_ptr<TensorOperation> operation_;
};

}  // namespace smddp
