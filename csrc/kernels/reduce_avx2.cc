// The kernels for x86 processors with AVX2 and F16C. CMakeLists.txt sets the flags; without them there are
// no such kernels.
#include "kernels/reduce_kernels.h"

#if defined(__AVX2__) && defined(__F16C__)
#define SMDDP_KERNELS avx2
#include "kernels/reduce_kernels.inc.h"

namespace smddp::kernels {

const Kernels* avx2_kernels() { return &avx2::kKernels; }

}  // namespace smddp::kernels
#else
namespace smddp::kernels {

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace smddp::kernels
#endif
