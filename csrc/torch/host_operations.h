// Collectives of CPU tensors as the core takes them: the tensors' checks, and one Operation of their
// memory's extents that keeps them alive. Every function throws ValueError where the tensors can't be
// the operands of such a collective.
#pragma once

#include "torch/tensors.h"

namespace smddp {

// Per tensor of the smaller side the larger one has one for each rank (`list`), in turn, or one that
// holds all of theirs. At least one of each. This process is rank `rank` of `size`.
std::shared_ptr<TensorOperation> gather_of(TensorRefs outputs, TensorRefs inputs, bool list,
                                           int rank, int size);
std::shared_ptr<TensorOperation> scatter_of(TensorRefs outputs, TensorRefs inputs, bool list,
                                            ReduceOp reduce_op, int rank, int size);
std::shared_ptr<TensorOperation> sum_of(TensorRefs tensors, ReduceOp reduce_op, int size);
std::shared_ptr<TensorOperation> barrier_of(int size);

}  // namespace smddp
