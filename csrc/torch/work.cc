#include "torch/work.h"

#include <algorithm>

#include "common/clock.h"
#include "common/exceptions.h"
#include "torch/error_state.h"
#include "torch/future_threads.h"
#include "torch/interruptible.h"
#include "torch/runtime.h"
#include "torch/statistics.h"

namespace smddp {

c10::intrusive_ptr<c10::ivalue::Future> TensorOperation::future() {
  std::lock_guard lock(mutex_);
  if (!future_) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (delivered_) answer(*future_);  // it has no callback yet
  }
  return future_;
}

void TensorOperation::await_future() {
  c10::intrusive_ptr<c10::ivalue::Future> asked;
  {
    std::lock_guard lock(mutex_);
    asked = future_;
  }
  if (asked) asked->wait();
}

void TensorOperation::answer(c10::ivalue::Future& future) const {
  if (status()) {
    future.markCompleted(c10::IValue(std::vector<at::Tensor>(results.begin(), results.end())));
  } else {
    future.setError(exception_of(status()));
  }
}

void TensorOperation::deliver() {
  for (auto& [to, from] : copy_back) {
    // Autograd does not see the write, as with any backend.
    at::AutoDispatchBelowADInplaceOrView raw;
    to.copy_(from);
  }
  uint64_t bytes = signature().bytes;
  complete_ns = now_ns();
  Statistics::process().update(name_of(collective), path, [&](StatisticsRow& row) {
    ++row.calls;
    row.bytes += bytes;
    row.fragments += fragments;
    row.largest_fragment = std::max(row.largest_fragment, largest_fragment);
    row.taken.slots += taken.slots;
    row.taken.in_place += taken.in_place;
    row.taken.single_copy += taken.single_copy;
    row.sent += sent;
    row.seconds += in_seconds(complete_ns - called_ns);
  });
  keep.clear();
  copy_back.clear();
}

// Whatever throws, a thread that waits for the future is told.
void TensorOperation::on_complete() {
  if (status()) {
    try {
      deliver();
    } catch (...) {
      fail(status_of_exception());
    }
  }
  record.end(status() ? complete_ns : now_ns(), status().ok());
  if (!status()) ErrorState::process().tell(status());
  c10::intrusive_ptr<c10::ivalue::Future> asked;
  {
    std::lock_guard lock(mutex_);
    delivered_ = true;
    asked = future_;
  }
  if (asked)
    FutureThreads::process().run([self = shared_from_this(), asked] { self->answer(*asked); });
}

void await(Engine& engine, TensorOperation& operation, std::chrono::milliseconds timeout) {
  if (!operation.complete()) {
    uint64_t from = now_ns();
    operation.record.enter_wait(from);
    operation.waited_from_ns.store(from, std::memory_order_relaxed);
    bool complete = false;
    bool waited = wait_interruptibly(timeout, [&](std::chrono::nanoseconds turn) {
      complete = engine.wait(operation, turn);
      return complete || engine.ended();
    });
    uint64_t until = now_ns();
    if (!complete) {
      std::string what = operation.called.empty() ? name_of(operation.collective) +
                                                        (" #" + std::to_string(operation.number()))
                                                  : operation.called;
      throw_status(
          waited ? Status(Code::kAborted, "the process is ending, with " + what + " under way")
                 : Status(Code::kTimeout,
                          what + " timed out: it is not complete within the time given to wait()"));
    }
    operation.record.leave_wait(until);
    if (operation.status()) {
      Statistics::process().update(
          name_of(operation.collective), operation.path, [&](StatisticsRow& row) {
            row.wait_seconds += in_seconds(until - from);
            // The waiting thread got its core back some time after the operation was complete.
            row.seconds += in_seconds(until - std::max(from, operation.complete_ns));
          });
    }
  }
  operation.await_future();
  if (operation.status()) return;
  ErrorState::process().hold();
  throw_status(operation.status());
}

std::exception_ptr WorkSMDDP::exception() const {
  const bool failed = operation_->complete() && !operation_->status();
  return failed ? exception_of(operation_->status()) : nullptr;
}

bool WorkSMDDP::wait(std::chrono::milliseconds timeout) {
  await(process_->engine(), *operation_, timeout);
  return true;
}

}  // namespace smddp
