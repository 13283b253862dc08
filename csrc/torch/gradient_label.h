// The label of operations that the hooks of gradients call, as DDP does for its buckets.
#pragma once

#include "recorder/flight_recorder.h"

namespace smddp {

// While it lives, operations of this thread that have no label are "gradient bucket n" if autograd
// accumulates a gradient at the moment: the n-th such operation of this backward pass.
class GradientLabel {
 public:
  GradientLabel();
  ~GradientLabel();
  GradientLabel(const GradientLabel&) = delete;
  GradientLabel& operator=(const GradientLabel&) = delete;

 private:
  bool labels_ = false;
};

}  // namespace smddp
