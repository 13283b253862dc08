// What the core reads of the environment: the users' settings, and the developers' in SMDDP_DEBUG.
// deepspeed_smddp/config/schema.py has all settings; tests/python/test_config.py compares the two.
// Called where a value is needed.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace smddp::env {

// X(name, default, meaning): the variables SMDDP_<name>
#define SMDDP_ENV_TABLE(X)                                                                         \
  X(HOST_ID, "", "identity of this host; ranks with equal identity share memory")                  \
  X(LIBFABRIC, "", "path of the libfabric shared object to open")                                  \
  X(DEVICE, "auto", "auto: GPUs by CUDA, host: threads simulate one, off: GPUs use the fallback")  \
  X(FABRIC_PROVIDER, "", "libfabric provider to use, for instance tcp;ofi_rxm")                    \
  X(FABRIC_INTERFACE, "", "interfaces, libfabric domains or IP addresses to use; ^a,b: not these") \
  X(JOB_SECRET_FILE, "", "file with the job's secret; empty: SMDDP_JOB_SECRET")                    \
  X(JOB_SECRET, "", "the job's secret; empty: random, handed out through the store")               \
  X(LOG_LEVEL, "warning", "error, warning, info or debug")

// X(key, default, meaning): the keys of SMDDP_DEBUG="key=value,key=value"
#define SMDDP_DEBUG_TABLE(X)                                                                      \
  X(algorithm, "auto", "pattern between hosts: auto, direct, log or joint")                       \
  X(transfer, "", "how large data is sent: writes or messages")                                   \
  X(curve, "auto", "latency us:us per message:GB/s of a host; auto, measure or default")          \
  X(libcuda, "libcuda.so.1", "CUDA's driver library to open")                                     \
  X(libgdrapi, "", "GDRCopy's library; empty: no GDRCopy. Never run on hardware")                 \
  X(flight_recorder, "2000", "the latest operations that are kept for reports; 0: none")          \
  X(hmem, "0", "1: NICs read and write GPU memory if the provider has FI_HMEM")                   \
  X(release_streams, "0", "1: a failure after wait() lets GPU work go on with what came")         \
  X(single_copy, "auto", "1: read peers' memory, 0: copy through the segment, auto: the cheaper") \
  X(spin_microseconds, "200", "how long a waiting thread polls and yields before it sleeps")      \
  X(check_locks, "0", "1: a thread that takes the engine's lock under the GIL ends the process")  \
  X(fork_copy_mib, "1024", "MiB of shared memory, at most, that are copied for a forked child")

// The value of the variable SMDDP_<name>, or its default if it is unset or empty. A name that is
// not in the table ends the process.
std::string get(const char* name);
// The same of a key of SMDDP_DEBUG. Python refuses unknown keys; here they have no effect.
std::string debug(const char* key);
// The same as a number; std::nullopt if it is none.
std::optional<double> debug_number(const char* key);

// A variable that a library reads, with its whole name.
struct Default {
  std::string name, value;
};
// Sets those of the variables that are not set. Other threads may read the environment meanwhile, which
// they may not beside setenv(): that frees the list of variables that they read. They may not change it.
void set_defaults(const std::vector<Default>& defaults);

}  // namespace smddp::env
