// What comes from files and the environment: the job's secret, the network model, the algorithm.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "collectives/selector.h"
#include "joining/job_secret.h"

using namespace smddp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int file = [] {
    int fd = ::memfd_create("secret", MFD_CLOEXEC);
    ::setenv("SMDDP_JOB_SECRET_FILE", ("/proc/self/fd/" + std::to_string(fd)).c_str(), 1);
    return fd;
  }();
  if (::ftruncate(file, 0) != 0 || ::pwrite(file, data, size, 0) != static_cast<ssize_t>(size))
    std::abort();
  auto secret = configured_secret();
  if (secret.ok() && (!secret.value().has_value() || size < kShortestSecret)) std::abort();
  std::string text(reinterpret_cast<const char*>(data), size);
  (void)parse_algorithm(text);
  (void)parse_network_model(text);
  return 0;
}
