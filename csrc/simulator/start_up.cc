#include "simulator/start_up.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "group/group.h"
#include "group/info_exchange.h"

namespace smddp::simulator {
namespace {

class CountedStore final : public Store {
 public:
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++traffic_.sets;
    values_[key] = value;
    return {};
  }
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string&) override {
    std::vector<std::vector<uint8_t>> found;
    for (const std::string& key : keys) {
      auto entry = values_.find(key);
      if (entry == values_.end())
        return Status(Code::kInternal, "a simulated rank would wait for " + key);
      found.push_back(entry->second);
      traffic_.bytes += entry->second.size();
    }
    traffic_.values += keys.size();
    return found;
  }
  bool has(const std::string& key) override { return values_.contains(key); }
  void remove(const std::string& key) override { values_.erase(key); }

  StoreTraffic traffic() const {
    StoreTraffic all = traffic_;
    all.keys_left = values_.size();
    return all;
  }

 private:
  std::map<std::string, std::vector<uint8_t>> values_;
  StoreTraffic traffic_;
};

RankInfo info_of(const RankInfo& sample, Rank rank, int ranks_per_host, std::mt19937_64& random) {
  RankInfo info = sample;
  info.host = info.host_name = "host-" + std::to_string(rank / ranks_per_host);
  for (auto& byte : info.key) byte = static_cast<std::decay_t<decltype(byte)>>(random());
  info.drawn = {random(), random()};
  info.token = random();
  info.pid = getpid();  // whose descriptors the segments of all hosts are
  std::vector<uint8_t>& address = info.fabric.address;  // it ends with the endpoint's number
  auto number = static_cast<uint64_t>(rank);
  if (address.size() >= sizeof number)
    std::memcpy(&address[address.size() - sizeof number], &number, sizeof number);
  return info;
}

}  // namespace

Result<StoreTraffic> count_start_up(int hosts, int ranks_per_host, const RankInfo& sample) {
  CountedStore store;
  std::mt19937_64 random(1);
  int ranks = hosts * ranks_per_host;
  Group::Options defaults;
  std::vector<std::unique_ptr<InfoExchange>> exchanges;
  std::vector<Rank> first_of_hosts;
  for (Rank rank = 0; rank < ranks; ++rank) {
    exchanges.push_back(std::make_unique<InfoExchange>(
        store, rank, ranks, InfoExchange::Options{defaults.timeout_ns, defaults.few_ranks, {}},
        [](auto&&...) { return Status(); }));
    Status out = exchanges.back()->publish(info_of(sample, rank, ranks_per_host, random));
    if (!out) return out;
    if (rank % ranks_per_host == 0) first_of_hosts.push_back(rank);
  }
  uint64_t most = 0;
  auto step = [&](auto&& of_rank) {
    uint64_t before = store.traffic().values;
    Status done = of_rank();
    most = std::max(most, store.traffic().values - before);
    return done;
  };
  // In the order of their numbers, each rank comes after those that it reads of.
  std::vector<RankInfo> infos;
  for (auto& exchange : exchanges) {
    Status known = step([&] {
      auto of_all = exchange->infos();
      if (of_all && infos.empty()) infos = std::move(of_all.value());
      return of_all.status();
    });
    if (!known) return known;
  }
  for (Rank first : first_of_hosts) {
    Status out = exchanges[static_cast<size_t>(first)]->publish_joined();
    if (!out) return out;
  }
  for (auto& exchange : exchanges) {
    Status joined = step([&] {
      return exchange->await_joined(first_of_hosts, infos, [](const auto&) { return ""; }).status();
    });
    if (!joined) return joined;
  }
  for (auto& exchange : exchanges) exchange->forget();
  exchanges.clear();
  StoreTraffic traffic = store.traffic();
  traffic.most_values = most;
  return traffic;
}

}  // namespace smddp::simulator
