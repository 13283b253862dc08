#include "network/cache.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>

#include "common/log.h"
#include "common/replace_file.h"
#include "common/siphash.h"
#include "network/model.h"

namespace smddp {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "network-";
constexpr size_t kLongestFile = 1024;
// Clocks of hosts differ.
constexpr int64_t kLargestClockDifference = 3600;

std::string cache_directory() {
  const char* base = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  if (base != nullptr && *base != '\0') return std::string(base) + "/deepspeed_smddp/tune";
  if (home == nullptr || *home == '\0') return {};
  return std::string(home) + "/.cache/deepspeed_smddp/tune";
}

std::string digest_of(const std::string& text) {
  char digest[33];
  std::snprintf(digest, sizeof digest, "%016llx%016llx",
                static_cast<unsigned long long>(siphash::hash({1, 0}, text.data(), text.size())),
                static_cast<unsigned long long>(siphash::hash({2, 0}, text.data(), text.size())));
  return digest;
}

// What model_of() may give: its bounds, rounded.
bool measurable(const NetworkModel& model) {
  auto within = [&](double NetworkModel::* number) {
    return model.*number >= 0.99 * kLeastMeasured.*number &&
           model.*number <= 1.01 * kMostMeasured.*number;
  };
  return within(&NetworkModel::latency_ns) && within(&NetworkModel::overhead_ns) &&
         within(&NetworkModel::bytes_per_ns);
}

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kLongestFile, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

void delete_old(const std::string& directory) {
  const auto oldest = fs::file_time_type::clock::now() - std::chrono::seconds(kLongestNetworkAge);
  std::error_code error, ignored;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    if (!at->path().filename().string().starts_with(kPrefix)) continue;
    auto written = fs::last_write_time(at->path(), ignored);
    if (!ignored && written < oldest) fs::remove(at->path(), ignored);
  }
}

int64_t seconds_since_1970() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::string text_of(const MeasuredNetwork& network) {
  return network.model + "@" + std::to_string(network.measured);
}

std::optional<MeasuredNetwork> parse_measured_network(const std::string& text) {
  const size_t at = text.find('@');
  if (at == std::string::npos) return std::nullopt;
  long long seconds = 0;
  char rest = 0;
  if (std::sscanf(text.c_str() + at + 1, "%lld%c", &seconds, &rest) != 1) return std::nullopt;
  auto model = parse_network_model(text.substr(0, at));
  if (!model || !measurable(model.value()) || seconds <= 0) return std::nullopt;
  return MeasuredNetwork{text_of(model.value()), seconds};
}

std::string date_of(int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm utc{};
  char text[40];
  if (::gmtime_r(&time, &utc) == nullptr) return "an unknown day";
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &utc)};
}

NetworkCache::NetworkCache(const std::vector<std::string>& hosts, const std::string& network,
                           const std::string& links)
    : directory_(cache_directory()) {
  std::map<std::string, int> ranks;
  for (const std::string& host : hosts) ++ranks[host];
  summary_ = std::to_string(hosts.size()) + " ranks on " + std::to_string(ranks.size()) +
             " hosts, " + network;
  std::string whole = SMDDP_VERSION "\n" + summary_ + "\n" + links;
  for (const auto& [host, count] : ranks) whole += "\n" + std::to_string(count) + " on " + host;
  topology_ = digest_of(whole);
  if (!directory_.empty()) path_ = directory_ + "/" + kPrefix + topology_;
}

std::optional<MeasuredNetwork> NetworkCache::load() const {
  std::error_code error;
  if (path_.empty() || !fs::exists(path_, error)) return std::nullopt;
  const std::string text = contents(path_);
  char network[128], topology[40];
  int read = std::sscanf(text.c_str(), "measured network %127s topology %39s", network, topology);
  auto found = read == 2 && topology == topology_ ? parse_measured_network(network) : std::nullopt;
  if (!found) {
    log(LogLevel::kWarning, path_ +
                                " holds no measured network of these hosts: it is measured again, "
                                "and the file replaced");
    return std::nullopt;
  }
  const int64_t age = seconds_since_1970() - found->measured;
  if (age > kLongestNetworkAge || age < -kLargestClockDifference) return std::nullopt;
  return found;
}

void NetworkCache::store(const std::string& model) const {
  if (path_.empty()) return;
  const MeasuredNetwork network{model, seconds_since_1970()};
  std::error_code error;
  fs::create_directories(directory_, error);
  delete_old(directory_);
  Status stored =
      replace_file(path_, "measured network " + text_of(network) + "\ntopology " + topology_ +
                              "\n" + date_of(network.measured) + ": " + summary_ + "\n");
  if (!stored && log_enabled(LogLevel::kInfo))
    log(LogLevel::kInfo, path_ + " could not be written; the next job measures the network again");
}

void NetworkCache::forget() const {
  std::error_code ignored;
  if (!path_.empty()) fs::remove(path_, ignored);
}

}  // namespace smddp
