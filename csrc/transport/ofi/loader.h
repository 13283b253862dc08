// libfabric, opened at run time. Only the functions below are symbols of the library; the rest of
// its API is static inline calls through the objects that these return, so nothing links against
// it. Knows nothing of providers. Called when an endpoint opens; errors are turned into text
// through it.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_errno.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/env.h"
#include "common/status.h"

namespace smddp::ofi {

struct Library {
  std::string path;      // as given to dlopen
  uint32_t version = 0;  // fi_version()
  uint32_t api = 0;      // the API version to ask fi_getinfo for
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;

  std::string version_text() const;      // "1.17"
  std::string error_text(int rc) const;  // of a (negative or positive) fi_errno value
};

// The libraries to try if none is named, in this order: EFA's own; then the packaged one and the
// loader's libfabric.so.1. With an RDMA device the loader's comes before the packaged one: the system's
// libfabric was built with the device's driver, the packaged one may know TCP only.
std::vector<std::string> library_candidates(const std::vector<std::string>& efa,
                                            const std::string& packaged, bool rdma_device);

// The provider verbs reads all names of the kernel's functions when fi_getinfo first asks it, 0.05 s of the processor
// (libfabric 2.5, benchmarks/results/2026-11-26-start-up-libfabric; up to 1.18 whatever is set here). It is not asked
// without an RDMA device, which it needs. `wanted`: what SMDDP_FABRIC_PROVIDER says.
std::vector<env::Default> provider_filter(bool rdma_device, const std::string& wanted);

// Opens `path`, or if it is empty SMDDP_LIBFABRIC, or if that is empty too the first of
// library_candidates() that can be opened. A path that was named and can't be opened is an error:
// another library is never taken in its place. The library stays loaded for the life of the process,
// as its providers may leave threads and exit handlers behind.
Result<Library> load_library(const std::string& path);

}  // namespace smddp::ofi
