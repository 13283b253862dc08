// The kernels for every processor of the architecture.
#define SMDDP_KERNELS baseline
#include "kernels/reduce_kernels.inc.h"

namespace smddp::kernels {

const Kernels* baseline_kernels() { return &baseline::kKernels; }

}  // namespace smddp::kernels
