// Keeps the network model that ranks have measured for later jobs on the same hosts: one small file per topology,
// in the directory where `smddp tune` keeps what it has measured (deepspeed_smddp/tuning/cache.py). To delete
// files there is always safe. Must not know who measures, nor how ranks agree. GroupBuilder makes it for
// NetworkAgreement; the torch module asks it what a job of its ranks would use.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smddp {

struct MeasuredNetwork {
  std::string model;     // as text_of() writes it
  int64_t measured = 0;  // seconds since 1970, UTC
};
// "21,3.1,0.12@1764150000", and back. std::nullopt if the text is something else, or names numbers that no
// measurement gives.
std::string text_of(const MeasuredNetwork& network);
std::optional<MeasuredNetwork> parse_measured_network(const std::string& text);
// "2026-11-26 09:04 UTC"
std::string date_of(int64_t seconds);

// What was measured longer ago is measured again.
inline constexpr int64_t kLongestNetworkAge = int64_t{7} * 24 * 3600;

// Of one topology: the hosts, how many ranks each has, the network of this host, and the version of this package.
class NetworkCache {
 public:
  // `hosts`: the identity of each rank's host. `network`, `links`: of this host's endpoint, for people and in full.
  NetworkCache(const std::vector<std::string>& hosts, const std::string& network,
               const std::string& links);

  // std::nullopt if there is none, or it is too old. A file that can't be used is told of once.
  std::optional<MeasuredNetwork> load() const;
  // What was measured now. Deletes networks that are too old. If the directory can't be written, the next job
  // measures again.
  void store(const std::string& model) const;
  // What is kept is not true any more: the next job measures.
  void forget() const;
  const std::string& path() const { return path_; }  // "": no directory

 private:
  std::string directory_, path_;
  std::string topology_;  // a digest
  std::string summary_;   // for people who look into the file
};

}  // namespace smddp
