#include "device/submission_order.h"

#include <algorithm>
#include <chrono>

#include "common/log.h"

namespace smddp::device {
namespace {

constexpr auto kPatience = std::chrono::seconds(1);

void warn() {
  static std::once_flag once;
  std::call_once(once, [] {
    log(LogLevel::kWarning,
        "a GPU collective waited a second for one of another group, which a rank has not called "
        "yet, and "
        "now passes it; call the collectives of all groups in one order on all ranks");
  });
}

}  // namespace

uint64_t SubmissionOrder::enter() {
  std::lock_guard lock(mutex_);
  turns_[++last_] = false;
  return last_;
}

void SubmissionOrder::begin(uint64_t turn) {
  std::unique_lock lock(mutex_);
  auto first = [&] { return turns_.empty() || turns_.begin()->first >= turn; };
  while (!changed_.wait_for(lock, kPatience, first)) {
    size_t passed =
        std::erase_if(turns_, [&](const auto& each) { return each.first < turn && !each.second; });
    if (passed > 0) warn();
  }
  turns_[turn] = true;
}

void SubmissionOrder::end(uint64_t turn) {
  {
    std::lock_guard lock(mutex_);
    turns_.erase(turn);
  }
  changed_.notify_all();
}

}  // namespace smddp::device
