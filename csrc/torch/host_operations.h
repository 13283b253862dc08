// From CPU tensors to the core's operations: each function checks the tensors and returns an Operation on
// their memory that keeps them alive. It throws ValueError if the tensors can't be operands of the collective.
#pragma once

#include "torch/tensors.h"

namespace smddp {

// Per tensor of the smaller side, the larger side has one tensor for each rank (`list`), one after the other,
// or one tensor that holds the parts of all ranks. Both sides have at least one tensor. This process is rank
// `rank` of `size`.
std::shared_ptr<TensorOperation> gather_of(TensorRefs outputs, TensorRefs inputs, bool list,
                                           int rank, int size);
std::shared_ptr<TensorOperation> scatter_of(TensorRefs outputs, TensorRefs inputs, bool list,
                                            ReduceOp reduce_op, int rank, int size);
std::shared_ptr<TensorOperation> sum_of(TensorRefs tensors, ReduceOp reduce_op, int size);
// From the root's tensor to those of all ranks.
std::shared_ptr<TensorOperation> broadcast_of(TensorRefs tensors, int64_t root, int rank, int size);
// From all ranks' tensors to the root's. The other ranks' tensors stay as they are.
std::shared_ptr<TensorOperation> reduce_of(TensorRefs tensors, ReduceOp reduce_op, int64_t root,
                                           int rank, int size);
std::shared_ptr<TensorOperation> barrier_of(int size);

// In these each pair of ranks has a block of its own.
//
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

// In a group of two, from rank 0 to rank 1.
std::shared_ptr<TensorOperation> message_of(const at::Tensor& tensor, bool sends, int tag);

}  // namespace smddp
