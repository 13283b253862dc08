// What is known of this machine's GPUs without using one.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "common/status.h"

namespace smddp::device {

struct CudaReport {
  std::string version;                     // of the API that the driver has, "12.4"
  std::vector<std::string> devices;        // names, with their multiprocessors
  std::vector<std::pair<int, int>> apart;  // pairs that can't read each other's memory
  std::string gdrcopy;                     // its version, or why it is not used
};

// Why there is no driver, or what it says. Makes no context on any GPU.
Result<CudaReport> cuda_report();

}  // namespace smddp::device
