// libfabric, opened at run time. Only the functions below are symbols of the library; the rest of
// its API is static inline calls through the objects these return, so nothing links against it.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_errno.h>

#include <cstdint>
#include <string>

#include "common/status.h"

namespace smddp::fabric {

struct Library {
  std::string path;      // as given to dlopen
  uint32_t version = 0;  // fi_version()
  uint32_t api = 0;      // what to ask fi_getinfo for
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;

  std::string version_text() const;      // "1.17"
  std::string error_text(int rc) const;  // of a (negative or positive) fi_errno value
};

// Opens `path`, or where it is empty SMDDP_LIBFABRIC, or where that is empty too the first of
// /opt/amazon/efa/lib*/libfabric.so.1 and the loader's own libfabric.so.1. A path that was named
// and can't be opened is an error: another library is never taken in its place. The library stays
// loaded for the life of the process: its providers may leave threads and exit handlers behind.
Result<Library> load_library(const std::string& path);

}  // namespace smddp::fabric
