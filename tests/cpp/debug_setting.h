// Variables of the environment, and keys of SMDDP_DEBUG, for the time of a test.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

namespace smddp {

class Variable {
 public:
  Variable(std::string name, const std::string& value) : name_(std::move(name)) {
    if (const char* before = std::getenv(name_.c_str())) before_ = before;
    ::setenv(name_.c_str(), value.c_str(), 1);
  }
  ~Variable() {
    before_ ? ::setenv(name_.c_str(), before_->c_str(), 1) : ::unsetenv(name_.c_str());
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  std::string name_;
  std::optional<std::string> before_;
};

// Set beside the keys that are set already: of a key that is there twice, the last value counts.
class DebugSetting : Variable {
 public:
  DebugSetting(const std::string& key, const std::string& value)
      : Variable("SMDDP_DEBUG", others() + "," + key + "=" + value) {}

 private:
  static std::string others() {
    const char* set = std::getenv("SMDDP_DEBUG");
    return set != nullptr ? set : "";
  }
};

}  // namespace smddp
