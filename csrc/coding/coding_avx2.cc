// The coder for x86 processors with AVX2. CMakeLists.txt sets the flags; without them there is none.
#include "coding/coding_kernels.h"

#if defined(__AVX2__)
#define SMDDP_KERNELS avx2
#include "coding/coding_kernels.inc.h"

namespace smddp::coding {

const Coder* avx2_coder() { return &avx2::kCoder; }

}  // namespace smddp::coding
#else
namespace smddp::coding {

const Coder* avx2_coder() { return nullptr; }

}  // namespace smddp::coding
#endif
