#include "group/join_watch.h"

#include <algorithm>
#include <utility>

#include "common/clock.h"
#include "joining/heartbeat.h"

namespace smddp {
namespace {

constexpr uint64_t kCountNs = std::chrono::nanoseconds(kHeartbeat).count();
// A process whose count has stood still for so long has ended if it refuses connections, even if it has never answered.
constexpr uint64_t kStandstillNs = 3 * kCountNs;
// The first value is one that may have stood there.
constexpr int kChanges = 3;

// Between looks at one count: the more ranks, the more look at it. What has answered a question is forgotten after
// some seconds (csrc/liveness), so a rank that asks looks often.
uint64_t look_every_ns(int ranks, uint64_t silent_ns) {
  if (silent_ns >= kStandstillNs) return kCountNs;
  return std::max(kCountNs, static_cast<uint64_t>(ranks) * 1'000'000);
}

}  // namespace

Status JoinWatch::look(Rank rank, const RankInfo& info, const std::string& host) {
  return info.host == host ? look_at_neighbor(rank, info) : look_at_count(rank, info);
}

Status JoinWatch::look_at_neighbor(Rank rank, const RankInfo& info) {
  std::shared_ptr<intranode::Neighbor>& known = neighbors_[rank];
  if (!known) {
    auto neighbor = process_.neighbor(info);
    if (!neighbor)
      return {neighbor.status().code(), describe(rank, info) + ": " + neighbor.status().message()};
    known = std::move(neighbor.value());
  }
  Engine::Lock lock = process_.engine().lock();  // other groups have the same neighbour
  if (!known->look_for_death()) return {};
  return {Code::kPeerLost, describe(rank, info) + " (process " + std::to_string(info.pid) +
                               ") ended while group '" + options_.name + "' was made"};
}

Status JoinWatch::look_at_count(Rank rank, const RankInfo& info) {
  Count& seen = counts_[rank];
  const uint64_t now = now_ns(), every = look_every_ns(ranks_, seen.silent_ns);
  if (now < seen.looked_ns + every) return {};
  std::vector<uint8_t> value;
  const std::string key = heartbeat_key(rank);
  if (store_.has(key)) {
    auto values = store_.get({key}, "");
    if (!values) return {};  // whether the store fails is seen elsewhere
    value = std::move(values.value()[0]);
  }
  // A rank that was stopped itself must not blame another one for that time.
  const uint64_t passed = seen.looked_ns == 0 ? 0 : std::min(now - seen.looked_ns, 2 * every);
  const bool counts = value != seen.value;
  if (counts) ++seen.changes;
  seen.silent_ns = counts ? 0 : seen.silent_ns + passed;
  seen.value = std::move(value);
  seen.looked_ns = now;
  if (seen.silent_ns == 0) return {};
  if (std::string port = port_of_ended(info, seen.silent_ns); !port.empty())
    return {Code::kPeerLost, describe(rank, info) + " is lost while group '" + options_.name +
                                 "' is made: its process has ended (" + port +
                                 " refuses connections)"};
  if (options_.silence_ns == 0 || seen.silent_ns < options_.silence_ns) return {};
  return {Code::kPeerLost, describe(rank, info) + " is lost while group '" + options_.name +
                               "' is made: it has not counted in the store for " +
                               seconds_text(seen.silent_ns) +
                               ". Its process was not seen to end: it is stopped, or its host or "
                               "network is gone (silence_seconds is " +
                               seconds_text(options_.silence_ns) + ")"};
}

bool JoinWatch::counts(Rank rank) const {
  auto seen = counts_.find(rank);
  return seen != counts_.end() && seen->second.changes >= kChanges;
}

std::string JoinWatch::port_of_ended(const RankInfo& info, uint64_t silent_ns) {
  Engine::Lock lock = process_.engine().lock();
  liveness::Liveness* service = process_.network().liveness();
  if (service == nullptr || info.fabric.liveness.empty()) return {};
  auto process = service->meet(info.fabric.liveness);
  if (!process) return {};
  const liveness::Verdict verdict = service->ask(process.value(), info.key);
  bool ended = verdict.ended || (verdict.refuses && silent_ns >= kStandstillNs);
  return ended ? service->text(process.value()) : std::string();
}

std::string JoinWatch::describe(Rank rank, const RankInfo& info) const {
  return "rank " + std::to_string(store_.number_of(rank)) + " (" + info.host_name + ")";
}

}  // namespace smddp
