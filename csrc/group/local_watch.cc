#include "group/local_watch.h"

#include <algorithm>

#include "common/clock.h"

namespace smddp {
namespace {

constexpr uint64_t kStateLookNs = 500'000'000;
// A process that was stopped itself must not count that time.
constexpr uint64_t kLongestNs = 1'000'000'000;

}  // namespace

Status LocalWatch::look(uint64_t now) {
  if (silence_ns_ == 0 || now < last_look_ns_ + kStateLookNs) return {};
  uint64_t passed = std::min(now - last_look_ns_, kLongestNs);
  last_look_ns_ = now;
  stopped_ns_.resize(static_cast<size_t>(local_.count()));
  for (int i = 0; i < local_.count(); ++i) {
    uint64_t& stopped = stopped_ns_[static_cast<size_t>(i)];
    if (!awaits(i) || !local_.neighbor(i).is_stopped()) {
      stopped = 0;
    } else {
      stopped = stopped == 0 ? 1 : stopped + passed;
    }
    if (stopped < silence_ns_) continue;
    return {Code::kPeerLost, members_.describe(local_.rank(i)) + " is lost during " +
                                 fragments_.in_flight().front()->describe() +
                                 ": it has not answered for " + seconds_text(stopped) +
                                 ". Its process " + std::to_string(local_.neighbor(i).pid()) +
                                 " was not seen to end: it is stopped (silence_seconds is " +
                                 seconds_text(silence_ns_) + ")"};
  }
  return {};
}

bool LocalWatch::awaits(int i) const {
  const auto& in_flight = fragments_.in_flight();
  return std::any_of(in_flight.begin(), in_flight.end(),
                     [=](const auto& fragment) { return fragment->needs(i); });
}

}  // namespace smddp
