// Flags in a GPU's memory, which the CPU writes by GDRCopy: a stream that waits for one reads no host memory.
// Has run with a stubbed GDRCopy only. CudaDevice calls it.
#pragma once

#include <memory>

#include "device/device.h"

namespace smddp::device {

// The error says why there are none. The device must outlive them.
Result<std::unique_ptr<HostFlags>> flags_on_gpu(Device& device);

}  // namespace smddp::device
