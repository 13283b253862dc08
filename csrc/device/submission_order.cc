#include "device/submission_order.h"

#include <algorithm>
#include <chrono>
#include <utility>

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

void SubmissionOrder::set_by_last_call(bool by_last_call) {
  std::lock_guard lock(mutex_);
  by_last_call_ = by_last_call;
}

uint64_t SubmissionOrder::enter(uint64_t group, Called called) {
  std::lock_guard lock(mutex_);
  turns_.emplace(++last_, Turn{group, std::move(called)});
  return last_;
}

void SubmissionOrder::set_last_call(uint64_t turn, uint64_t ns) {
  {
    std::lock_guard lock(mutex_);
    turns_.at(turn).last_call_ns = ns;
  }
  changed_.notify_all();
}

bool SubmissionOrder::comes_before(const Turns::value_type& other,
                                   const Turns::value_type& mine) const {
  const auto& [turn, its] = other;
  if (turn == mine.first || (its.passed && !its.begun)) return false;
  if (!by_last_call_) return turn < mine.first;
  if (its.begun) return true;
  // A rank that has yet to call it will do so later than the last call of `mine`.
  if (its.last_call_ns == 0) return its.called();
  return std::pair(its.last_call_ns, its.group) <
         std::pair(mine.second.last_call_ns, mine.second.group);
}

void SubmissionOrder::begin(uint64_t turn) {
  std::unique_lock lock(mutex_);
  auto& mine = *turns_.find(turn);
  auto before = [&](const auto& each) { return comes_before(each, mine); };
  while (
      !changed_.wait_for(lock, kPatience, [&] { return std::ranges::none_of(turns_, before); })) {
    bool passed = false;
    for (auto& each : turns_) {
      if (each.second.begun || !before(each)) continue;
      each.second.passed = passed = true;
    }
    if (passed) warn();
  }
  mine.second.begun = true;
}

void SubmissionOrder::end(uint64_t turn) {
  {
    std::lock_guard lock(mutex_);
    turns_.erase(turn);
  }
  changed_.notify_all();
}

}  // namespace smddp::device
