// The kernels for x86 processors with AVX-512 F, BW, DQ and VL. CMakeLists.txt sets the flags; without them
// there are no such kernels.
#include "kernels/reduce_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SMDDP_KERNELS avx512
#include "kernels/reduce_kernels.inc.h"

namespace smddp::kernels {

const Kernels* avx512_kernels() { return &avx512::kKernels; }

}  // namespace smddp::kernels
#else
namespace smddp::kernels {

const Kernels* avx512_kernels() { return nullptr; }

}  // namespace smddp::kernels
#endif
