#pragma once

#include "common/types.h"

namespace smddp::device {

// What nvcc made of reduce_kernels.cu, for cuModuleLoadData(); nullptr where the build had no nvcc.
const void* cuda_kernels();
// A kernel's name in there; nullptr where there is none.
const char* kernel_name(Dtype dtype, ReduceOp op);

}  // namespace smddp::device
