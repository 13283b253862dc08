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
#include "joining/info_exchange.h"

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

// What a rank tells for its `group`-th group.
void tell_group(RankInfo& info, Rank rank, uint32_t group, std::mt19937_64& random) {
  info.serial = 0;
  info.drawn = {};
  if (rank > 0) {
    info.serial = group;
    info.key = own_key(info.token, group);
    return;
  }
  for (auto& byte : info.key) byte = static_cast<std::decay_t<decltype(byte)>>(random());
  if (!info.has_secret) info.drawn = {random(), random()};
}

RankInfo info_of(const RankInfo& sample, Rank rank, int ranks_per_host, std::mt19937_64& random) {
  RankInfo info = sample;
  info.host = info.host_name = "host-" + std::to_string(rank / ranks_per_host);
  info.token = random();
  info.pid = getpid();  // whose descriptors the segments of all hosts are
  std::vector<uint8_t>& address = info.fabric.address;  // it ends with the endpoint's number
  auto number = static_cast<uint64_t>(rank);
  if (address.size() >= sizeof number)
    std::memcpy(&address[address.size() - sizeof number], &number, sizeof number);
  tell_group(info, rank, 1, random);
  return info;
}

std::vector<RankInfo> infos_of(int hosts, int ranks_per_host, const RankInfo& sample,
                               std::mt19937_64& random) {
  std::vector<RankInfo> infos;
  for (Rank rank = 0; rank < hosts * ranks_per_host; ++rank)
    infos.push_back(info_of(sample, rank, ranks_per_host, random));
  return infos;
}

// A group is made of ranks that are `told`; `places`: what each of them knows before.
Result<StoreTraffic> count_making(const std::vector<RankInfo>& told,
                                  const std::vector<OwnPlace>& places) {
  CountedStore store;
  Group::Options defaults;
  std::vector<std::unique_ptr<InfoExchange>> exchanges;
  std::vector<Rank> first_of_hosts;
  auto ranks = static_cast<int>(told.size());
  for (size_t r = 0; r < told.size(); ++r) {
    auto rank = static_cast<Rank>(r);
    exchanges.push_back(std::make_unique<InfoExchange>(
        store, rank, ranks, InfoExchange::Options{defaults.timeout_ns, defaults.few_ranks, {}},
        [](auto&&...) { return Status(); }, places[r]));
    if (Status out = exchanges.back()->publish(told[r]); !out) return out;
    if (r == 0 || told[r].host != told[r - 1].host) first_of_hosts.push_back(rank);
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
  const bool several = first_of_hosts.size() > 1;
  for (Rank first : several ? first_of_hosts : std::vector<Rank>()) {
    Status out = exchanges[static_cast<size_t>(first)]->publish_found(InfoExchange::kJoined);
    if (!out) return out;
  }
  for (auto& exchange : exchanges) {
    if (!several) break;
    Status joined = step([&] {
      return exchange
          ->await_found(InfoExchange::kJoined, first_of_hosts, infos, [](auto&) { return ""; })
          .status();
    });
    if (!joined) return joined;
  }
  for (auto& exchange : exchanges) exchange->forget();
  exchanges.clear();
  StoreTraffic traffic = store.traffic();
  traffic.most_values = most;
  return traffic;
}

}  // namespace

Result<StoreTraffic> count_start_up(int hosts, int ranks_per_host, const RankInfo& sample) {
  std::mt19937_64 random(1);
  auto infos = infos_of(hosts, ranks_per_host, sample, random);
  return count_making(infos, std::vector<OwnPlace>(infos.size()));
}

Result<StoreTraffic> count_further_group(int hosts, int ranks_per_host, const RankInfo& sample,
                                         const std::vector<Rank>& members) {
  std::mt19937_64 random(1);
  auto infos = infos_of(hosts, ranks_per_host, sample, random);
  auto directory = std::make_shared<const ProcessDirectory>(infos[0].key, infos);
  std::vector<RankInfo> told;
  std::vector<OwnPlace> places;
  for (Rank member : members) {
    RankInfo info = infos[static_cast<size_t>(member)];
    places.push_back({directory, member, info});
    tell_group(info, static_cast<Rank>(told.size()), 2, random);
    told.push_back(std::move(info));
  }
  return count_making(told, places);
}

}  // namespace smddp::simulator
