// A GPU, through CUDA's driver. It uses the device's primary context, which torch uses as well. Knows no
// group or operation. The torch module calls it.
#pragma once

#include <functional>
#include <memory>

#include "device/device.h"

namespace smddp::device {

// GPU `ordinal` in CUDA's numbering in this process. The error says why it can't be used.
Result<std::unique_ptr<Device>> open_cuda_device(int ordinal);

// Whether work that is submitted to the stream goes into a graph. False without a driver.
bool cuda_stream_records(Stream stream);
// Calls `function`, in which this thread may allocate and load what a recording would otherwise forbid, or be
// invalidated by.
void outside_of_recordings(const std::function<void()>& function);

}  // namespace smddp::device
