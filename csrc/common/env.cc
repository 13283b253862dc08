#include "common/env.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <sstream>

namespace smddp::env {
namespace {

struct Row {
  const char* name;
  const char* fallback;
};

constexpr Row kVariables[] = {
#define SMDDP_ROW(name, value, meaning) {#name, value},
    SMDDP_ENV_TABLE(SMDDP_ROW)};
constexpr Row kDebug[] = {SMDDP_DEBUG_TABLE(SMDDP_ROW)
#undef SMDDP_ROW
};

template <size_t kRows>
const char* default_of(const Row (&table)[kRows], const char* name) {
  for (const Row& row : table)
    if (std::strcmp(row.name, name) == 0) return row.fallback;
  std::abort();  // a bug, found by the first test that runs it
}

}  // namespace

std::string get(const char* name) {
  const char* fallback = default_of(kVariables, name);
  const char* set = std::getenv((std::string("SMDDP_") + name).c_str());
  return set != nullptr && *set != '\0' ? set : fallback;
}

std::string debug(const char* key) {
  const char* fallback = default_of(kDebug, key);
  const char* set = std::getenv("SMDDP_DEBUG");
  std::istringstream pairs(set != nullptr ? set : "");
  std::string prefix = std::string(key) + '=', found = fallback;
  for (std::string pair; std::getline(pairs, pair, ',');)
    if (pair.starts_with(prefix)) found = pair.substr(prefix.size());
  return found;
}

std::optional<double> debug_number(const char* key) {
  std::string text = debug(key);
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0') return std::nullopt;
  return value;
}

// A longer list takes the place of the old one, which is never freed. So a reader sees either list, and
// each stays as it is. The readers' loads depend on one load of `environ`, so the release suffices.
void set_defaults(const std::vector<Default>& defaults) {
  static std::mutex mutex;
  // Never freed, as said above.
  static auto& kept = *new std::vector<std::unique_ptr<char*[]>>();
  static auto& texts = *new std::deque<std::string>();
  std::lock_guard lock(mutex);
  std::vector<char*> list;
  for (char** at = environ; at != nullptr && *at != nullptr; ++at) list.push_back(*at);
  size_t before = list.size();
  for (const Default& variable : defaults) {
    if (std::getenv(variable.name.c_str()) != nullptr) continue;
    list.push_back(texts.emplace_back(variable.name + "=" + variable.value).data());
  }
  if (list.size() == before) return;
  kept.push_back(std::make_unique<char*[]>(list.size() + 1));
  std::copy(list.begin(), list.end(), kept.back().get());
  std::atomic_ref(environ).store(kept.back().get(), std::memory_order_release);
}

}  // namespace smddp::env
