// The coder for x86 processors with AVX-512 F, BW, DQ and VL. CMakeLists.txt sets the flags; without them there is none.
#include "coding/coding_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SMDDP_KERNELS avx512
#include "coding/coding_kernels.inc.h"

namespace smddp::coding {

const Coder* avx512_coder() { return &avx512::kCoder; }

}  // namespace smddp::coding
#else
namespace smddp::coding {

const Coder* avx512_coder() { return nullptr; }

}  // namespace smddp::coding
#endif
