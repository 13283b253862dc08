// The process's limit of open files, which is often 1,024 at first. Called by owners of many file descriptors.
#pragma once

#include <sys/resource.h>

#include <cstddef>
#include <string>

#include "common/log.h"

namespace smddp {

// Raises the soft limit to the hard one if `descriptors` are more than half of it. `what` needs them: the log says
// so.
inline void make_room_for_descriptors(size_t descriptors, const std::string& what) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max ||
      descriptors < limit.rlim_cur / 2)
    return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) == 0)
    log(LogLevel::kInfo,
        what + ": the limit of open files is now " + std::to_string(limit.rlim_max));
}

}  // namespace smddp
