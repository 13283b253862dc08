#include "flows/step_order.h"

#include <algorithm>

namespace smddp {
namespace {

// Flows up to this size go out at once, whatever the steps: the start-ups cost more than queues. Up to 64 KiB, 256 KiB
// took 9 % longer on 4 x 1 (2026-11-21, AMD EPYC). Not measured: sizes between.
constexpr size_t kSmallFlow = 4 << 10;

// Bytes of a receive flow that may still be missing when the next step starts. They cover the time until
// the processor that has to act is free, so that the link never idles. If a whole step might be
// missing, hosts would get out of step, and two of them would queue for a third: 16 MiB on 4 x 1 takes 108 ms, with 8 KiB
// 127, with a whole step 150 (2026-11-21, AMD EPYC).
size_t slack(const ReceiveFlow& receive) { return receive.run.bytes() / 8 * 5; }

}  // namespace

void StepOrder::begin(const FlowList<ReceiveFlow>& receives, bool ordered, size_t reach) {
  reach_ = reach;
  kept_ = ordered && step_within(receives, reach) < INT_MAX &&
          std::any_of(
              receives.begin(), receives.end(),
              [](const ReceiveFlow& receive) { return receive.run.bytes() > kSmallFlow; });
  look(receives);
}

void StepOrder::look(const FlowList<ReceiveFlow>& receives) {
  while (arrived_ < receives.size()) {
    const ReceiveFlow& receive = receives[arrived_];
    if (receive.coverage.total() + slack(receive) < receive.run.bytes()) break;
    ++arrived_;
  }
  if (!kept_) return;
  open_ = step_within(receives, reach_);
  // A READY takes as long as the bytes that it allows, and leaves some steps before that.
  near_ =
      open_ == INT_MAX ? INT_MAX : std::max(open_ + kStepsAhead, step_within(receives, 2 * reach_));
}

int StepOrder::step_within(const FlowList<ReceiveFlow>& receives, size_t bytes) const {
  for (size_t i = arrived_; i < receives.size(); ++i) {
    size_t missing = receives[i].run.bytes() - receives[i].coverage.total();
    if (missing > bytes) return receives[i].step;
    bytes -= missing;
  }
  return INT_MAX;
}

}  // namespace smddp
