// The reduction kernels, one per type and operation. CudaDevice finds them by name (kernel_name()). The
// arithmetic is in reduce_arithmetic.h.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define SMDDP_BOTH __host__ __device__ __forceinline__
#define SMDDP_UNROLL _Pragma("unroll")
#include "kernels/reduce_arithmetic.h"

using namespace smddp::kernels;

// One block uses a whole multiprocessor: it has as many threads as fit.
#define SMDDP_KERNEL(type, element, name, op, suffix)                                      \
  extern "C" __global__ void __launch_bounds__(1024, 1)                                    \
      smddp_reduce_##name##_##suffix(const __grid_constant__ Reduction reduction) {        \
    reduce_share_as<element, op>(reduction, blockIdx.x * size_t{blockDim.x} + threadIdx.x, \
                                 gridDim.x * size_t{blockDim.x});                          \
  }
#define SMDDP_KERNELS_OF(type, element, name) SMDDP_REDUCING_OPS(SMDDP_KERNEL, type, element, name)
SMDDP_REDUCED_TYPES(SMDDP_KERNELS_OF)
