// A GPU, through CUDA's driver. It uses the device's primary context, which torch uses as well. Knows no
// group or operation. The torch module calls it.
#pragma once

#include <memory>

#include "device/device.h"

namespace smddp::device {

// GPU `ordinal` in CUDA's numbering in this process. The error says why it can't be used.
Result<std::unique_ptr<Device>> open_cuda_device(int ordinal);

// True if this build contains the reduction kernels.
bool has_cuda_kernels();

}  // namespace smddp::device
