// For x86 processors with AVX2 and F16C. CMakeLists.txt sets the flags; without them, nothing.
#include "device/reduce_kernels.h"

#if defined(__AVX2__) && defined(__F16C__)
#define SMDDP_KERNELS avx2
#include "device/reduce_kernels.inc.h"

namespace smddp::device {

const Kernels* avx2_kernels() { return &avx2::kKernels; }

}  // namespace smddp::device
#else
namespace smddp::device {

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace smddp::device
#endif
