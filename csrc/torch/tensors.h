// From tensors to extents, with the checks that must come before a byte is sent.
#pragma once

#include <ATen/ATen.h>

#include <c10/util/SmallVector.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "common/types.h"
#include "torch/work.h"

namespace smddp {

// The core's name for a type, kBytes for those that are only moved.
Dtype dtype_of(at::ScalarType type);
// The core's reduction, if it has that one.
std::optional<ReduceOp> reduction_of(const c10d::ReduceOp& op);

// The caller's tensors, none of them copied.
using TensorRefs = c10::ArrayRef<const at::Tensor*>;
using TensorRefList = c10::SmallVector<const at::Tensor*, 8>;
TensorRefList refs(const std::vector<at::Tensor>& tensors);
TensorRefList refs(const std::vector<std::vector<at::Tensor>>& lists);

// Why smddp does not carry these tensors itself, or nullptr if it does.
const char* foreign(TensorRefs tensors);
// The same for sums over them.
const char* foreign(TensorRefs tensors, const c10d::ReduceOp& op);

// The input's values in contiguous memory, which the operation keeps: its own if it is contiguous.
Extent readable(TensorOperation& op, const at::Tensor& input);
// Contiguous memory that becomes the output, one of the operation's results: its own, or that of a
// stand-in, which is copied back at the end.
Extent writable(TensorOperation& op, const at::Tensor& output, bool stand_in = false);

// True if the tensors' memory overlaps, except where both begin at the same byte.
bool overlap_askew(const Extent& a, const Extent& b);
Extent extent_of(const at::Tensor& tensor);

// Throws ValueError with `sentence`, a text or a function that makes it, unless `good`.
[[noreturn]] void refuse(const std::string& sentence);
template <class Sentence>
void require(bool good, Sentence&& sentence) {
  if (good) [[likely]]
    return;
  if constexpr (std::is_invocable_v<Sentence>) {
    refuse(sentence());
  } else {
    refuse(sentence);
  }
}

}  // namespace smddp
