// The Status of a system call that has just failed.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include "common/status.h"

namespace smddp {

// kUnavailable with `what` and the text of errno.
inline Status errno_status(const std::string& what) {
  return {Code::kUnavailable, what + ": " + std::strerror(errno)};
}

}  // namespace smddp
