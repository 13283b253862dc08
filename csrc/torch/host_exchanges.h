// From CPU tensors to the core's operations in which each pair of ranks has a block of its own, as
// host_operations.h does it for the others. Each function throws ValueError if the tensors can't be operands.
#pragma once

#include "torch/tensors.h"

namespace smddp {

// `output` and `input` are cut along their first dimension, into parts of so many rows for each rank; equal ones
// if `output_splits` or `input_splits` is empty.
std::shared_ptr<TensorOperation> all_to_all_of(const at::Tensor& output, const at::Tensor& input,
                                               const std::vector<int64_t>& output_splits,
                                               const std::vector<int64_t>& input_splits, int rank,
                                               int size);
// One tensor for each rank in both lists.
std::shared_ptr<TensorOperation> all_to_all_of(TensorRefs outputs, TensorRefs inputs, int rank,
                                               int size);
// `inputs` is one tensor; `outputs` one for each rank on the root, and none on the other ranks.
std::shared_ptr<TensorOperation> gather_to_root_of(TensorRefs outputs, TensorRefs inputs,
                                                   int64_t root, int rank, int size);
// The other way round.
std::shared_ptr<TensorOperation> scatter_from_root_of(TensorRefs outputs, TensorRefs inputs,
                                                      int64_t root, int rank, int size);

}  // namespace smddp
