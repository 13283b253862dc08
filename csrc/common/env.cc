#include "common/env.h"

#include <cstdlib>
#include <cstring>

namespace smddp::env {
namespace {

struct Row {
  const char* name;
  const char* fallback;
};

constexpr Row kTable[] = {
#define SMDDP_ROW(name, value, meaning) {#name, value},
    SMDDP_ENV_TABLE(SMDDP_ROW)
#undef SMDDP_ROW
};

}  // namespace

std::string get(const char* name) {
  for (const Row& row : kTable) {
    if (std::strcmp(row.name, name) != 0) continue;
    const char* set = std::getenv((std::string("SMDDP_") + name).c_str());
    return set != nullptr && *set != '\0' ? set : row.fallback;
  }
  std::abort();  // a bug, found by the first test that runs it
}

std::optional<double> get_number(const char* name) {
  std::string text = get(name);
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0') return std::nullopt;
  return value;
}

}  // namespace smddp::env
