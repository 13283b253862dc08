#include "torch/gradient_label.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string>
#include <vector>

namespace smddp {
namespace {

using recorder::FlightRecorder;
using recorder::Text;

// Of one thread, as each backward pass runs the hooks of a device's gradients in one.
struct Buckets {
  int pass = -1;
  size_t called = 0;
  std::vector<Text> labels;
};
thread_local Buckets buckets;

bool accumulates_gradient() {
  auto node = torch::autograd::get_current_node();
  return node && dynamic_cast<torch::autograd::AccumulateGrad*>(node.get()) != nullptr;
}

Text next_label() {
  int pass = torch::autograd::get_current_graph_task_id();
  if (pass != buckets.pass) {
    buckets.pass = pass;
    buckets.called = 0;
  }
  if (++buckets.called > buckets.labels.size()) {
    buckets.labels.push_back(FlightRecorder::process().text(
        "gradient bucket " + std::to_string(buckets.called) + " of the backward pass"));
  }
  return buckets.labels[buckets.called - 1];
}

}  // namespace

GradientLabel::GradientLabel() : labels_(FlightRecorder::label() == 0 && accumulates_gradient()) {
  if (labels_) FlightRecorder::set_label(next_label());
}

GradientLabel::~GradientLabel() {
  if (labels_) FlightRecorder::set_label(0);
}

}  // namespace smddp
