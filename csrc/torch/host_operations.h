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

}  // namespace smddp
