// The compiled GPU kernels that this library contains, and their names. Knows no driver. CudaDevice loads
// them, and the torch module asks whether there are any.
#pragma once

#include "common/types.h"

namespace smddp::device {

// The output of nvcc for reduce_kernels.cu, for cuModuleLoadData(); nullptr if the build had no nvcc.
const void* cuda_kernels();
// The name of a kernel in it; nullptr if there is no such kernel.
const char* kernel_name(Dtype dtype, ReduceOp op);

}  // namespace smddp::device
