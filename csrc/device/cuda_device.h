// A GPU, by CUDA's driver. Works in the device's primary context, the one that torch works in.
#pragma once

#include <memory>

#include "device/device.h"

namespace smddp::device {

// GPU `ordinal`, by CUDA's own numbering in this process; why it can't be had.
Result<std::unique_ptr<Device>> open_cuda_device(int ordinal);

// True where this build contains the reduction kernels.
bool has_cuda_kernels();

}  // namespace smddp::device
