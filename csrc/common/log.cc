#include "common/log.h"

#include <unistd.h>

#include <cstdio>

#include "common/env.h"

namespace smddp {
namespace {

LogLevel level_from_env() {
  std::string text = env::get("LOG_LEVEL");
  if (text == "error") return LogLevel::kError;
  if (text == "info") return LogLevel::kInfo;
  if (text == "debug") return LogLevel::kDebug;
  return LogLevel::kWarning;
}

}  // namespace

bool log_enabled(LogLevel level) {
  static const LogLevel enabled = level_from_env();
  return level <= enabled;
}

void log(LogLevel level, const std::string& message) {
  if (!log_enabled(level)) return;
  static constexpr const char* kNames[] = {"error", "warning", "info", "debug"};
  std::fprintf(stderr, "smddp[%d] %s: %s\n", static_cast<int>(getpid()),
               kNames[static_cast<int>(level)], message.c_str());
}

}  // namespace smddp
