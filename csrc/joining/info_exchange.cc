#include "joining/info_exchange.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "common/clock.h"
#include "common/siphash.h"
#include "joining/rank_table.h"
#include "topology/topology.h"

namespace smddp {
namespace {

constexpr const char* kInfo = "rank_info";
constexpr const char* kWhole = "whole_info";          // of a rank that refers to a directory
constexpr const char* kWholeWanted = "whole_wanted";  // by rank 0 of a large group
constexpr const char* kFabric = "fabric";
// Stores limit the bytes of a value: torch's TCPStore takes 8 MiB.
constexpr size_t kRanksPerPart = 4096;
// How often a waiting rank looks whether the store still answers, at the most.
constexpr uint64_t kStoreLookNs = 200'000'000;

std::string part_key(const std::string& topic, size_t part) {
  return topic + "/table/" + std::to_string(part);
}
std::string handed_key(const std::string& topic, Rank leader) {
  return topic + "/handed/" + std::to_string(leader);
}
std::string host_key(const std::string& host) {
  char digest[17];
  std::snprintf(digest, sizeof digest, "%016llx",
                static_cast<unsigned long long>(siphash::hash({}, host.data(), host.size())));
  return std::string("host/") + digest;
}

size_t parts_of(size_t ranks) { return (ranks + kRanksPerPart - 1) / kRanksPerPart; }

// Of a text, which may be empty: some stores keep no empty value.
Blob value_of(const std::string& text) {
  Blob value(1 + text.size(), 1);
  std::copy(text.begin(), text.end(), value.begin() + 1);
  return value;
}
std::string found_in(const Blob& value) {
  return value.empty() ? std::string() : std::string(value.begin() + 1, value.end());
}

// The first rank of its host, if there are several hosts.
bool awaited_by_hosts(const std::vector<RankInfo>& infos, Rank rank) {
  const std::string& host = infos[static_cast<size_t>(rank)].host;
  auto elsewhere = [&](const RankInfo& info) { return info.host != host; };
  return std::all_of(infos.begin(), infos.begin() + rank, elsewhere) &&
         std::any_of(infos.begin(), infos.end(), elsewhere);
}

// What rank 0 makes of the topic's values for the others of a large group.
std::string all_of(const std::string& topic) { return "all_" + topic; }

}  // namespace

Status InfoExchange::set(const std::string& key, const Blob& value) {
  published_.push_back(key);
  return store_.set(key, value);
}

Status InfoExchange::begin_heartbeat() {
  std::string key = heartbeat_key(rank_);
  if (std::find(last_keys_.begin(), last_keys_.end(), key) == last_keys_.end())
    last_keys_.push_back(std::move(key));
  return heartbeat_.begin();
}

Status InfoExchange::publish(const RankInfo& mine) {
  host_ = mine.host;
  if (!few() && rank_ == 0) {
    if (Status begun = begin_heartbeat(); !begun) return begun;
  }
  Blob value = values_.describe(mine);
  may_be_asked_ = values_.refers();
  // Ranks that lack the directory wait for rank 0 as well.
  if (may_be_asked_ && !few() && rank_ == 0) {
    may_be_asked_ = false;
    if (Status out = set(key_of(kWhole, rank_), values_.whole()); !out) return out;
  }
  return set(key_of(kInfo, rank_), value);
}

Status InfoExchange::publish(const FabricAddress& mine) {
  return set(key_of(kFabric, rank_), encode(mine));
}

Result<std::vector<RankInfo>> InfoExchange::infos() {
  auto blobs = exchange(kInfo, all_ranks(ranks_));
  if (!blobs) return blobs.status();
  may_be_asked_ = false;
  auto infos = values_.read_all(blobs.value());
  if (!infos || !awaited_by_hosts(infos.value(), rank_)) return infos;
  if (Status begun = begin_heartbeat(); !begun) return begun;
  return infos;
}

Result<std::vector<FabricAddress>> InfoExchange::fabrics(const std::vector<Rank>& of) {
  auto blobs = exchange(kFabric, of);
  if (!blobs) return blobs.status();
  std::vector<FabricAddress> fabrics;
  for (const Blob& blob : blobs.value()) {
    auto fabric = decode<FabricAddress>(blob);
    if (!fabric) return fabric.status();
    fabrics.push_back(std::move(fabric.value()));
  }
  return fabrics;
}

Result<InfoExchange::Blobs> InfoExchange::exchange(const std::string& topic,
                                                   const std::vector<Rank>& from) {
  if (few()) return collect_clear(topic, from);
  if (rank_ != 0 && leader_.rank < 0) {
    if (Status found = find_leader(from); !found) return found;
  }
  auto blobs = rank_ == 0              ? gather(topic, from)
               : leader_.rank == rank_ ? read_table(topic, from)
                                       : take_handed(topic, from);
  if (!blobs) return blobs;
  if (blobs.value().size() != from.size())
    return Status(Code::kInternal, "a table of ranks lacks some");
  if (leader_.rank != rank_) return blobs;
  if (Status handed = hand_on(topic, blobs.value()); !handed) return handed;
  return blobs;
}

// Rank 0 reads the blobs and publishes them as a table.
Result<InfoExchange::Blobs> InfoExchange::gather(const std::string& topic,
                                                 const std::vector<Rank>& from) {
  auto blobs = collect_clear(topic, from);
  if (!blobs) return blobs;
  if (leader_.rank < 0) {
    if (Status told = publish_leaders(blobs.value()); !told) return told;
  }
  for (size_t part = 0; part < parts_of(from.size()); ++part) {
    auto first = blobs.value().begin() + static_cast<std::ptrdiff_t>(part * kRanksPerPart);
    auto left = blobs.value().end() - first;
    Blobs some(first, first + std::min(left, static_cast<std::ptrdiff_t>(kRanksPerPart)));
    if (Status out = set(part_key(topic, part), pack_table(some)); !out) return out;
  }
  return blobs;
}

Result<InfoExchange::Blobs> InfoExchange::collect_clear(const std::string& topic,
                                                        const std::vector<Rank>& from) {
  auto blobs = collect(store_, topic, from);
  if (!blobs) return blobs;
  const std::vector<Rank> unclear = RankValues::unclear(blobs.value());
  if (unclear.empty()) return blobs;
  Status told = few() ? tell_whole_if_asked() : set(kWholeWanted, {1});
  if (!told) return told;
  auto whole = collect(store_, kWhole, unclear);
  if (!whole) return whole;
  for (size_t i = 0; i < unclear.size(); ++i)
    blobs.value()[static_cast<size_t>(unclear[i])] = std::move(whole.value()[i]);
  return blobs;
}

// In a small group the values that all ranks read ask for it.
Status InfoExchange::tell_whole_if_asked() {
  if (!may_be_asked_ || (!few() && !store_.has(kWholeWanted))) return {};
  may_be_asked_ = false;
  return set(key_of(kWhole, rank_), values_.whole());
}

Status InfoExchange::publish_leaders(const Blobs& infos) {
  auto decoded = values_.read_all(infos);
  if (!decoded) return decoded.status();
  std::vector<std::string> hosts;
  for (const RankInfo& info : decoded.value()) hosts.push_back(info.host);
  Topology topology(hosts);
  for (int node = 0; node < topology.nodes(); ++node) {
    const std::vector<Rank>& here = topology.node(node);
    HostLeader leader{here[0], static_cast<int32_t>(here.size()),
                      std::move(decoded.value()[static_cast<size_t>(here[0])])};
    if (node == 0) {
      leader_ = std::move(leader);  // this rank
    } else if (Status out = set(host_key(hosts[static_cast<size_t>(here[0])]), encode(leader));
               !out) {
      return out;
    }
  }
  return {};
}

// Rank 0 is the first rank of its host, so the ranks of that host need not wait to be told.
Status InfoExchange::find_leader(const std::vector<Rank>& all) {
  auto first = await({key_of(kInfo, 0), 0, nullptr, kInfo, all});
  if (first && !values_.can_read(first.value()))
    first = await({key_of(kWhole, 0), 0, nullptr, kInfo, all});
  if (!first) return first.status();
  auto infos = values_.read_all({first.value()});
  if (!infos) return infos.status();
  first_ = std::move(infos.value()[0]);
  if (first_->host == host_) {
    leader_ = {0, 0, *first_};
    return {};
  }
  auto told = await({host_key(host_), 0, first_rank(), kInfo, all});
  if (!told) return told.status();
  auto leader = decode<HostLeader>(told.value());
  if (!leader) return leader.status();
  if (leader.value().info.host != host_)
    return Status(Code::kInternal, "two hosts, \"" + host_ + "\" and \"" +
                                       leader.value().info.host +
                                       "\", have one digest; give one another SMDDP_HOST_ID");
  leader_ = std::move(leader.value());
  return {};
}

Result<InfoExchange::Blobs> InfoExchange::read_table(const std::string& topic,
                                                     const std::vector<Rank>& from) {
  Blobs all;
  for (size_t part = 0; part < parts_of(from.size()); ++part) {
    auto table = await({part_key(topic, part), 0, first_rank(), topic, from});
    if (!table) return table.status();
    auto some = unpack_table(table.value());
    if (!some) return some;
    std::move(some.value().begin(), some.value().end(), std::back_inserter(all));
  }
  return all;
}

// The segment lives as long as this object: until all ranks of the host have joined.
Status InfoExchange::hand_on(const std::string& topic, const Blobs& blobs) {
  if (leader_.ranks == 1) return {};
  Blob table = pack_table(blobs);
  auto shared = intranode::create_shared("smddp-rank-table", table.size());
  if (!shared) return shared.status();
  std::memcpy(shared.value().mapping.data(), table.data(), table.size());
  handed_.push_back(std::move(shared.value()));
  return set(handed_key(topic, rank_), encode(HandedTable{handed_.back().fd.get(), table.size()}));
}

Result<InfoExchange::Blobs> InfoExchange::take_handed(const std::string& topic,
                                                      const std::vector<Rank>& from) {
  auto told = await({handed_key(topic, leader_.rank), leader_.rank, &leader_.info, topic, from});
  if (!told) return told.status();
  auto handed = decode<HandedTable>(told.value());
  if (!handed) return handed.status();
  if (Status alive = look_(leader_.rank, leader_.info, host_); !alive) return alive;
  auto mapping =
      intranode::map_shared(leader_.info.pid, handed.value().fd, "the first rank of this host");
  if (!mapping) {
    Status alive = look_(leader_.rank, leader_.info, host_);
    return alive ? mapping.status() : alive;
  }
  size_t bytes = std::min<size_t>(handed.value().bytes, mapping.value().size());
  const auto* at = reinterpret_cast<const uint8_t*>(mapping.value().data());
  return unpack_table(Blob(at, at + bytes));
}

// By looks with pauses between them, as Store::get() looks at no process.
Status InfoExchange::wait_for(const Awaited& awaited) {
  const uint64_t until = now_ns() + options_.timeout_ns;
  const auto longest = longest_pause_of(static_cast<size_t>(ranks_));
  const auto every = std::max<uint64_t>(kStoreLookNs, std::chrono::nanoseconds(longest).count());
  uint64_t next = now_ns() + every;
  Pause pause(longest);
  while (!store_.has(awaited.key)) {
    if (Status failure = published_failure(store_); !failure) return failure;
    if (Status told = tell_whole_if_asked(); !told) return told;
    Status alive = awaited.info ? look_(awaited.by, *awaited.info, host_) : Status();
    if (!alive) return alive;
    if (now_ns() >= until) {
      std::vector<Rank> late = overdue(store_, awaited.topic, awaited.from);
      return did_not_join(store_, late.empty() ? std::vector<Rank>{awaited.by} : late);
    }
    if (now_ns() >= next) {  // has() hides that a store has died
      auto own = collect(store_, kInfo, {rank_});
      if (!own) return own.status();
      next = now_ns() + every;
    }
    pause.sleep();
  }
  return {};
}

Result<Blob> InfoExchange::await(const Awaited& awaited) {
  if (Status set = wait_for(awaited); !set) return set;
  auto values = store_.get({awaited.key}, "");
  if (!values) return values.status();
  return std::move(values.value()[0]);
}

Status InfoExchange::publish_found(const char* topic, const std::string& found) {
  last_keys_.push_back(key_of(topic, rank_));
  return store_.set(last_keys_.back(), value_of(found));
}

Result<std::string> InfoExchange::await_found(const std::string& topic,
                                              const std::vector<Rank>& first_of_hosts,
                                              const std::vector<RankInfo>& infos,
                                              const Agree& agree) {
  const std::string all = all_of(topic);
  if (!few() && rank_ != 0) {
    auto told = await({all, 0, infos.data(), topic, first_of_hosts});
    return told ? found_in(told.value()) : Result<std::string>(told.status());
  }
  for (Rank first : first_of_hosts) {
    if (first == rank_) continue;
    const RankInfo& info = infos[static_cast<size_t>(first)];
    Status told = wait_for({key_of(topic, first), first, &info, topic, first_of_hosts});
    if (!told) return told;
  }
  auto told = collect(store_, topic, first_of_hosts);
  if (!told) return told.status();
  std::vector<std::string> found;
  for (const Blob& value : told.value()) found.push_back(found_in(value));
  std::string agreed = agree(found);
  if (few()) return agreed;
  last_keys_.push_back(all);
  if (Status out = store_.set(all, value_of(agreed)); !out) return out;
  return agreed;
}

std::vector<std::string> InfoExchange::last_keys_of(const std::vector<Rank>& first_of_hosts) {
  std::vector<std::string> keys;
  for (const char* topic : {kJoined, kMeasured}) {
    for (Rank first : first_of_hosts) keys.push_back(key_of(topic, first));
    keys.push_back(all_of(topic));
  }
  for (Rank first : first_of_hosts) keys.push_back(heartbeat_key(first));
  return keys;
}

void InfoExchange::forget() {
  for (const std::string& key : published_) store_.remove(key);
  published_.clear();
}

}  // namespace smddp
