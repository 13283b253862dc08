// The coder for every processor of the architecture.
#define SMDDP_KERNELS baseline
#include "coding/coding_kernels.inc.h"

namespace smddp::coding {

const Coder* baseline_coder() { return &baseline::kCoder; }

}  // namespace smddp::coding
