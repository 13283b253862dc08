// A Work of Gloo as the caller sees it: the flight recorder hears of its waits and of its end, and a failure is
// told before it is raised.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <string>

#include "recorder/flight_recorder.h"

namespace smddp {

class ForwardedWork final : public c10d::Work {
 public:
  // `what`: how an error names the operation.
  ForwardedWork(c10::intrusive_ptr<c10d::Work> work, recorder::Mark record, std::string what)
      : Work(-1, work->retrieveOpType()),
        work_(std::move(work)),
        record_(record),
        what_(std::move(what)) {}

  bool wait(std::chrono::milliseconds timeout) override;

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  void blockCurrentStream() override { work_->blockCurrentStream(); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return work_->getFutureResult();
  }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  void failed(const char* why);

  c10::intrusive_ptr<c10d::Work> work_;
  recorder::Mark record_;
  std::string what_;
};

}  // namespace smddp
