// From tensors to extents of memory, and which tensors smddp carries.
#pragma once

#include <ATen/ATen.h>

#include <c10/util/SmallVector.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "common/types.h"
#include "topology/pattern.h"
#include "torch/work.h"

namespace smddp {

// The core's name for an element type; kBytes for types that can be moved but not summed.
Dtype dtype_of(at::ScalarType type);
// The core's name for a reduction; nothing if the core does not have it.
std::optional<ReduceOp> reduction_of(const c10d::ReduceOp& op);

// The caller's tensors, by reference.
using TensorRefs = c10::ArrayRef<const at::Tensor*>;
using TensorRefList = c10::SmallVector<const at::Tensor*, 8>;
TensorRefList refs(const std::vector<at::Tensor>& tensors);
TensorRefList refs(const std::vector<std::vector<at::Tensor>>& lists);

// Why the fallback must carry these tensors; nullptr if smddp can.
const char* why_fallback(TensorRefs tensors);
// The same for sums over them.
const char* why_fallback(TensorRefs tensors, const c10d::ReduceOp& op);

// Why the fallback must carry what smddp owns for tensors on CPUs alone. `op`: of sums.
const char* why_not_on_host(TensorRefs tensors, const c10d::ReduceOp* op = nullptr);

// The same for what each pair of the group's ranks has a block of its own of.
const char* why_not_paired(const Topology& topology, TensorRefs tensors);

// Whether its memory holds its values end to end.
bool is_plain(const at::Tensor& tensor);
// Contiguous memory with the input's values, kept alive by the operation: the input's own memory if that is
// contiguous, else a copy.
Extent readable(TensorOperation& op, const at::Tensor& input);
// Contiguous memory for the output, which becomes one of the operation's results: the output's own memory if
// that is contiguous and no stand-in is wanted, else that of a stand-in, which is copied back at the end.
Extent writable(TensorOperation& op, const at::Tensor& output, bool stand_in = false);

// True if the extents overlap and do not begin at the same byte.
bool overlap_askew(const Extent& a, const Extent& b);
Extent extent_of(const at::Tensor& tensor);

// Throws ValueError unless `good`. `sentence`: the message, or a function that makes it.
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
