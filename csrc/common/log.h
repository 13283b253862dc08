// Lines to stderr, at the level of SMDDP_LOG_LEVEL. Never called on the data path.
#pragma once

#include <string>

namespace smddp {

enum class LogLevel { kError, kWarning, kInfo, kDebug };

bool log_enabled(LogLevel level);
void log(LogLevel level, const std::string& message);

}  // namespace smddp
