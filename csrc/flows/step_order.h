// How far the steps of a fragment have come on this rank: which flows may be sent, and which may be allowed more.
// Must not know other fragments, or how bytes move. FragmentFlows asks it.
//
// Large flows keep the order of the pattern's steps in time: a send flow of step s waits until every
// receive flow of an earlier step has 3/8 of its bytes, or until those of them that lack more lack no more
// together than what crosses the network in the time in which this rank hears of bytes (reach_bytes() of
// collectives/selector.h). So each host sends to one other host and receives from one, and no port of a switch
// has to hold more of other hosts' data than that while other ports idle. A rank that is late delays the others
// by no more than the time in which it has to send its own data anyway.
#pragma once

#include <climits>
#include <cstddef>

#include "flows/flow.h"

namespace smddp {

// READYs leave this many steps before their flows: they queue behind a step's data on the way. Not measured.
inline constexpr int kStepsAhead = 2;

class StepOrder {
 public:
  // Of a fragment's receive flows, in their order. `ordered`: the pattern's steps may matter.
  void begin(const FlowList<ReceiveFlow>& receives, bool ordered, size_t reach);
  // Counts what has arrived since.
  void look(const FlowList<ReceiveFlow>& receives);

  bool kept() const { return kept_; }
  // Every receive flow has enough of its bytes for the next step.
  bool complete(const FlowList<ReceiveFlow>& receives) const { return arrived_ == receives.size(); }
  bool in_last_steps(const FlowList<ReceiveFlow>& receives) const {
    return complete(receives) || receives[arrived_].step + kStepsAhead > receives.back().step;
  }
  // The latest steps whose flows may be sent, and may be allowed more, as far as steps matter.
  int open() const { return open_; }
  int near() const { return near_; }

 private:
  // The step of the first receive flow, from the first without enough bytes on, with which more than `bytes`
  // bytes are missing in all; INT_MAX: they are no more together.
  int step_within(const FlowList<ReceiveFlow>& receives, size_t bytes) const;

  bool kept_ = false;
  size_t reach_ = 0;
  size_t arrived_ = 0;  // receive flows, from the first on, with enough bytes for the next step
  int open_ = INT_MAX, near_ = INT_MAX;
};

}  // namespace smddp
