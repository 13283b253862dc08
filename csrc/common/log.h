// Lines to stderr, off the data path. Level from SMDDP_LOG_LEVEL.
#pragma once

#include <string>

namespace smddp {

enum class LogLevel { kError, kWarning, kInfo, kDebug };

bool log_enabled(LogLevel level);
void log(LogLevel level, const std::string& message);

}  // namespace smddp
