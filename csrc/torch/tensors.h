// From tensors to extents, with the checks that must come before a byte is sent.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>
#include <string>
#include <vector>

#include "common/types.h"
#include "torch/work.h"

namespace smddp {

// The core's name for a type, kBytes for those that are only moved.
Dtype dtype_of(at::ScalarType type);
// The core's reduction, if it has that one.
std::optional<ReduceOp> reduction_of(const c10d::ReduceOp& op);

// Why smddp does not carry these tensors itself, or nullptr if it does.
const char* foreign(const std::vector<at::Tensor>& tensors);
// The same for sums over them.
const char* foreign(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);

// A contiguous tensor with the input's values: itself if it is one.
at::Tensor readable(TensorOperation& op, const at::Tensor& input);
// A contiguous tensor that becomes the output: itself, or a stand-in that is copied back at the
// end.
at::Tensor writable(TensorOperation& op, const at::Tensor& output, bool stand_in = false);

// True if the tensors' memory overlaps, except where both begin at the same byte.
bool overlap_askew(const Extent& a, const Extent& b);
Extent extent_of(const at::Tensor& tensor);

// Throws ValueError with `sentence` unless `good`.
void require(bool good, const std::string& sentence);

}  // namespace smddp
