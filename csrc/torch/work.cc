#include "torch/work.h"

#include "common/clock.h"
#include "torch/runtime.h"
#include "torch/statistics.h"

namespace smddp {
namespace {

constexpr std::chrono::nanoseconds kForever = std::chrono::hours(24 * 365);
// How long a wait may keep a signal from Python.
constexpr std::chrono::nanoseconds kInterruptible = std::chrono::milliseconds(200);

}  // namespace

TensorOperation::TensorOperation()
    : future(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
      started_ns(now_ns()) {}

std::exception_ptr TensorOperation::exception() const {
  try {
    throw_status(status());
  } catch (...) {
    return std::current_exception();
  }
}

void TensorOperation::on_done() {
  if (!status()) {
    future->setError(exception());
    return;
  }
  for (auto& [to, from] : copy_back) {
    at::AutoDispatchBelowADInplaceOrView
        raw;  // a write that autograd does not see, as for any backend
    to.copy_(from);
  }
  uint64_t bytes = signature().bytes;
  Statistics::process().update(name_of(collective), path, [&](StatisticsRow& row) {
    ++row.calls;
    row.bytes += bytes;
    row.rounds += rounds;
    row.largest_round = std::max(row.largest_round, largest_round);
    row.seconds += static_cast<double>(now_ns() - started_ns) * 1e-9;
  });
  keep.clear();
  copy_back.clear();
  future->markCompleted(c10::IValue(results));
}

std::exception_ptr WorkSMDDP::exception() const {
  return operation_->done() && !operation_->status() ? operation_->exception() : nullptr;
}

bool WorkSMDDP::wait(std::chrono::milliseconds timeout) {
  if (!operation_->done()) {
    uint64_t from = now_ns();
    bool done = false;
    std::chrono::nanoseconds left =
        timeout.count() > 0 ? std::chrono::nanoseconds(timeout) : kForever;
    while (!done && left.count() > 0) {
      std::chrono::nanoseconds turn = std::min(left, kInterruptible);
      done = engine_.wait(*operation_, turn);
      left -= turn;
      if (!done) check_interrupt();
    }
    double seconds = static_cast<double>(now_ns() - from) * 1e-9;
    if (!done) {
      throw_status({Code::kTimeout, std::string(name_of(operation_->collective)) + " #" +
                                        std::to_string(operation_->number()) +
                                        " was not done within the time given to wait()"});
    }
    if (operation_->status()) {
      Statistics::process().update(name_of(operation_->collective), operation_->path,
                                   [&](StatisticsRow& row) { row.wait_seconds += seconds; });
    }
  }
  if (!operation_->status()) throw_status(operation_->status());
  return true;
}

}  // namespace smddp
