// The process's limit of open files, which is often 1,024 at first. Called by owners of many file descriptors.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <cstddef>
#include <string>

#include "common/log.h"

namespace smddp {

// Raises the soft limit, as far as the hard one allows, if `descriptors` are more than half of it. `what` needs them:
// the log says so.
inline void make_room_for_descriptors(size_t descriptors, const std::string& what) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max ||
      descriptors < limit.rlim_cur / 2)
    return;
  constexpr rlim_t kPlenty = 65536;  // programs loop over all numbers that are allowed
  limit.rlim_cur = std::min(limit.rlim_max, std::max<rlim_t>(kPlenty, 2 * descriptors));
  if (setrlimit(RLIMIT_NOFILE, &limit) == 0)
    log(LogLevel::kInfo,
        what + ": the limit of open files is now " + std::to_string(limit.rlim_cur));
}

}  // namespace smddp
