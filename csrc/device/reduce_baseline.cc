// For every processor of the architecture.
#define SMDDP_KERNELS baseline
#include "device/reduce_kernels.inc.h"

namespace smddp::device {

const Kernels* baseline_kernels() { return &baseline::kKernels; }

}  // namespace smddp::device
