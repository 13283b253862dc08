// A report on this machine's GPUs, made without using a GPU. Knows no group. The torch module calls it, for
// the tool that checks a machine's set-up.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "common/status.h"

namespace smddp::device {

struct CudaReport {
  std::string version;                     // of the driver's API, for example "12.4"
  std::vector<std::string> devices;        // names, with the number of multiprocessors
  std::vector<std::pair<int, int>> apart;  // pairs of GPUs that can't read each other's memory
};

// What the driver reports, or why there is no driver. Creates no context on any GPU.
Result<CudaReport> cuda_report();

}  // namespace smddp::device
