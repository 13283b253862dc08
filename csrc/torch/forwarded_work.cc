#include "torch/forwarded_work.h"

#include "common/clock.h"
#include "torch/error_state.h"

namespace smddp {

bool ForwardedWork::wait(std::chrono::milliseconds timeout) {
  record_.enter_wait(now_ns());
  try {
    bool done = work_->wait(timeout);
    uint64_t now = now_ns();
    record_.leave_wait(now);
    record_.end(now, done);
    return done;
  } catch (const std::exception& error) {
    failed(error.what());
    throw;
  }
}

void ForwardedWork::failed(const char* why) {
  uint64_t now = now_ns();
  record_.leave_wait(now);
  record_.end(now, false);
  ErrorState::process().tell({Code::kUnavailable, what_ + " failed: " + why});
  ErrorState::process().hold();
}

}  // namespace smddp
