// A key of SMDDP_DEBUG for a test: set beside the keys that are set already.
#pragma once

#include <cstdlib>
#include <string>

namespace smddp {

class DebugSetting {
 public:
  DebugSetting(const std::string& key, const std::string& value) {
    if (const char* set = std::getenv("SMDDP_DEBUG")) before_ = set;
    // Of a key that is there twice, the last value counts.
    ::setenv("SMDDP_DEBUG", (before_ + "," + key + "=" + value).c_str(), 1);
  }
  ~DebugSetting() { ::setenv("SMDDP_DEBUG", before_.c_str(), 1); }
  DebugSetting(const DebugSetting&) = delete;
  DebugSetting& operator=(const DebugSetting&) = delete;

 private:
  std::string before_;
};

}  // namespace smddp
