#include "device/cuda_report.h"

#include <utility>

#include "device/cuda_api.h"

namespace smddp::device {

Result<CudaReport> cuda_report() {
  const Result<cuda::Api>& driver = cuda::api();
  if (!driver) return driver.status();
  const cuda::Api& api = driver.value();
  CudaReport report;
  int version = 0, count = 0;
  Status s = api.check(api.cuDriverGetVersion(&version), "cuDriverGetVersion");
  if (s) s = api.check(api.cuDeviceGetCount(&count), "cuDeviceGetCount");
  report.version = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  std::vector<cuda::CUdevice> devices(static_cast<size_t>(count));
  for (int i = 0; i < count && s; ++i) {
    cuda::CUdevice& device = devices[static_cast<size_t>(i)];
    char name[128] = "";
    int multiprocessors = 0;
    s = api.check(api.cuDeviceGet(&device, i), "cuDeviceGet");
    if (s) s = api.check(api.cuDeviceGetName(name, sizeof name, device), "cuDeviceGetName");
    if (s) {
      s = api.check(api.cuDeviceGetAttribute(&multiprocessors, cuda::kMultiprocessorCount, device),
                    "cuDeviceGetAttribute");
    }
    report.devices.push_back(std::string(name) + " (" + std::to_string(multiprocessors) +
                             " multiprocessors)");
  }
  for (int i = 0; i < count && s; ++i) {
    for (int j = i + 1; j < count && s; ++j) {
      auto a = devices[static_cast<size_t>(i)], b = devices[static_cast<size_t>(j)];
      int there = 0, back = 0;
      s = api.check(api.cuDeviceCanAccessPeer(&there, a, b), "cuDeviceCanAccessPeer");
      if (s) s = api.check(api.cuDeviceCanAccessPeer(&back, b, a), "cuDeviceCanAccessPeer");
      if (there == 0 || back == 0) report.apart.emplace_back(i, j);
    }
  }
  return s ? Result<CudaReport>(std::move(report)) : Result<CudaReport>(s);
}

}  // namespace smddp::device
