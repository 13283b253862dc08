// A collective as torch sees it: the operation with the tensors that it keeps alive, its future, and its
// Work.
#pragma once

#include <c10/util/SmallVector.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mutex>

#include "group/group.h"

namespace smddp {

class TensorOperation final : public Operation,
                              public std::enable_shared_from_this<TensorOperation> {
 public:
  c10::SmallVector<at::Tensor, 2> results;  // what the caller gets; mostly written in place
  c10::SmallVector<at::Tensor, 2> keep;     // kept alive: everything else that the operation reads
  // Contiguous stand-ins: copied to the caller's tensors at the end.
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_back;  // (to, from)
  c10::SmallVector<std::byte, 64> scratch;                   // a barrier's bytes
  std::string called;        // "recv from rank 2 (host b)"; "": by its collective
  int source = -1;           // of a message: the rank that sends; -1: not known yet
  uint64_t complete_ns = 0;  // set before complete()

  // Made by the first call, as few callers ask for it. May be called from any thread at any time.
  c10::intrusive_ptr<c10::ivalue::Future> future();
  // Once complete(): until the future is complete as well, if there is one.
  void await_future();

 protected:
  void on_complete() override;

 private:
  void deliver();
  void answer(c10::ivalue::Future& future) const;

  std::mutex mutex_;
  bool delivered_ = false;  // a future made from now on is complete at once
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Drives the engine until the operation is complete. Throws if the operation failed, or when `timeout` is over
// (zero: no limit).
void await(Engine& engine, TensorOperation& operation, std::chrono::milliseconds timeout);

class WorkSMDDP final : public c10d::Work {
 public:
  WorkSMDDP(int rank, c10d::OpType type, std::shared_ptr<Process> process,
            std::shared_ptr<TensorOperation> operation)
      : Work(rank, type), process_(std::move(process)), operation_(std::move(operation)) {}

  bool isCompleted() override { return operation_->complete(); }
  bool isSuccess() const override { return operation_->complete() && operation_->status().ok(); }
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override {
    return {operation_->results.begin(), operation_->results.end()};
  }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return operation_->future(); }
  uint64_t getSequencenumber() const override { return operation_->number(); }
  int sourceRank() const override { return operation_->source; }

 private:
  const std::shared_ptr<Process> process_;
  std::shared_ptr<TensorOperation> operation_;
};

}  // namespace smddp
