// The one table of the environment variables that the core reads. deepspeed_smddp/config/variables.py lists
// the same names; tests/python/test_config.py compares the two tables. Called where a value is
// needed.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace smddp::env {

// X(name, default, meaning)
#define SMDDP_ENV_TABLE(X)                                                                         \
  X(HOST_ID, "", "identity of this host; ranks with equal identity share memory")                  \
  X(LIBFABRIC, "", "path of the libfabric shared object to open")                                  \
  X(LIBCUDA, "libcuda.so.1", "path of CUDA's driver library to open")                              \
  X(LIBGDRAPI, "libgdrapi.so.2", "path of GDRCopy's library to open")                              \
  X(DEVICE, "auto", "auto: GPUs by CUDA, host: threads simulate one, off: GPUs use the fallback")  \
  X(FABRIC_PROVIDER, "", "libfabric provider to use, for instance tcp;ofi_rxm")                    \
  X(FABRIC_INTERFACE, "", "libfabric domains or IP addresses to use, separated by commas")         \
  X(FABRIC_TRANSFER, "", "how large data is sent: writes, tagged or messages")                     \
  X(FABRIC_HMEM, "0", "1: NICs read and write GPU memory if the provider has FI_HMEM")             \
  X(JOB_SECRET_FILE, "", "file with the job's secret; empty: SMDDP_JOB_SECRET")                    \
  X(JOB_SECRET, "", "the job's secret; empty: random, handed out through the store")               \
  X(TIMEOUT_SECONDS, "600", "deadline of one operation")                                           \
  X(FABRIC_CURVE, "auto", "latency us, us per message, GB/s of a host; auto, measure or default")  \
  X(ALGORITHM, "auto", "pattern between hosts: auto, direct, log or joint")                        \
  X(SINGLE_COPY, "auto", "1: read peers' memory, 0: copy through the segment, auto: the cheaper")  \
  X(SHARED_ALLOCATOR, "0", "1: CPU tensors of 64 KiB and more are in memory that local ranks map") \
  X(FORK_COPY_MIB, "1024", "MiB of shared memory, at most, that are copied for a forked child")    \
  X(SPIN_MICROSECONDS, "200", "how long a waiting thread polls and yields before it sleeps")       \
  X(LEAVE_SHARED_CORES, "1", "0: a waiting thread stays on a core that another rank uses as well") \
  X(FLIGHT_RECORDER, "2000", "the latest operations that are kept for reports; 0: none")           \
  X(LOG_LEVEL, "warning", "error, warning, info or debug")

// The value of the variable SMDDP_<name>, or its default if it is unset or empty. A name that is
// not in the table ends the process.
std::string get(const char* name);
// The same as a number; std::nullopt if it is none.
std::optional<double> get_number(const char* name);

// A variable that a library reads, with its whole name.
struct Default {
  std::string name, value;
};
// Sets those of the variables that are not set. Other threads may read the environment meanwhile, which
// they may not beside setenv(): that frees the list of variables that they read. They may not change it.
void set_defaults(const std::vector<Default>& defaults);

}  // namespace smddp::env
