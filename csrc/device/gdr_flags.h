// Flags in a GPU's memory, which the CPU writes over the PCIe bus by GDRCopy (github.com/NVIDIA/gdrcopy), opened at run
// time: a stream that waits for one reads no host memory. Has run with a stubbed GDRCopy only. CudaDevice
// calls it.
#pragma once

#include <memory>

#include "device/device.h"

namespace smddp::device {

// By the library that SMDDP_DEBUG=libgdrapi names and its kernel module, both 2.0 or newer. The error says why there are
// none. The device must outlive them.
Result<std::unique_ptr<HostFlags>> flags_on_gpu(Device& device);

}  // namespace smddp::device
