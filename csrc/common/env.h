// The one table of environment variables that the core reads. deepspeed_smddp/config.py lists the
// same names; tests/python/test_config.py checks the two against each other.
#pragma once

#include <optional>
#include <string>

namespace smddp::env {

// X(name, default, meaning)
#define SMDDP_ENV_TABLE(X)                                                                         \
  X(HOST_ID, "", "identity of this host; ranks with equal identity share memory")                  \
  X(LIBFABRIC, "", "path of the libfabric shared object to open")                                  \
  X(LIBCUDA, "libcuda.so.1", "path of CUDA's driver library to open")                              \
  X(LIBGDRAPI, "libgdrapi.so.2", "path of GDRCopy's library to open")                              \
  X(DEVICE, "auto", "auto: GPUs by CUDA, host: threads play one, off: the fallback carries GPUs")  \
  X(FABRIC_PROVIDER, "", "libfabric provider to use, for instance tcp;ofi_rxm")                    \
  X(FABRIC_INTERFACE, "", "libfabric domains or IP addresses to use, with commas")                 \
  X(FABRIC_TRANSFER, "", "how large data travels: writes, tagged or messages")                     \
  X(FABRIC_HMEM, "0", "1: NICs read and write GPUs' memory where the provider has FI_HMEM")        \
  X(TIMEOUT_SECONDS, "600", "deadline of one operation")                                           \
  X(FABRIC_CURVE, "20,4,1.25", "network: latency us, us per message, GB/s of a host")              \
  X(ALGORITHM, "auto", "pattern between hosts: auto, direct, log or joint")                        \
  X(SINGLE_COPY, "auto", "1: read peers' memory, 0: copy through the segment, auto: the cheaper")  \
  X(SHARED_ALLOCATOR, "0", "1: CPU tensors of 64 KiB and more lie in memory that local ranks map") \
  X(FORK_COPY_MIB, "1024", "how much shared memory a forked child gets its own copy of")           \
  X(SPIN_MICROSECONDS, "200", "how long a waiting thread polls, yielding, before it sleeps")       \
  X(LOG_LEVEL, "warning", "error, warning, info or debug")

// The variable's value (without its prefix SMDDP_), or its default where unset or empty.
std::string get(const char* name);
std::optional<double> get_number(const char* name);

}  // namespace smddp::env
