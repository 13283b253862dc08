#include "group/network_agreement.h"

#include <algorithm>
#include <chrono>

#include "common/env.h"
#include "common/log.h"
#include "group/network_measurement.h"

namespace smddp {
namespace {

int64_t seconds_since_1970() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Status NetworkAgreement::read_settings() {
  const std::string curve = env::get("FABRIC_CURVE");
  anew_ = curve == "measure";
  given_ = options_.network.has_value() || (curve != "auto" && !anew_);
  model_ = options_.network.value_or(NetworkModel{});
  if (!given_ || options_.network || curve == "default") return {};
  Result<NetworkModel> model = parse_network_model(curve);
  if (model) model_ = model.value();
  return model.status();
}

void NetworkAgreement::describe(RankInfo* mine) {
  mine->network_given = given_;
  if (given_) {
    told_ = text_of(model_);
  } else {
    Engine::Lock lock = engine_.lock();
    told_ = engine_.network().known().model;
  }
  mine->network = digest_of_text(told_);
}

Status NetworkAgreement::agree(const std::vector<RankInfo>& infos, const Members& members) {
  if (members.topology().nodes() == 1) return {};
  const RankInfo& first = infos[0];
  bool all_know = first.network != 0;
  for (size_t r = 1; r < infos.size(); ++r) {
    bool same = infos[r].network == first.network;
    if (infos[r].network_given != first.network_given || (first.network_given && !same))
      return {Code::kInvalid, members.describe(static_cast<Rank>(r)) +
                                  " has another SMDDP_FABRIC_CURVE than " + members.describe(0) +
                                  ": give all ranks the same"};
    all_know &= same;
  }
  unknown_ = !all_know;
  if (unknown_ || given_) return {};
  Result<NetworkModel> model = parse_network_model(told_);  // which all have told
  if (model) model_ = model.value();
  return model.status();
}

std::string NetworkAgreement::recall(const std::vector<RankInfo>& infos, const Topology& topology,
                                     Rank rank) {
  const fabric::Endpoint* endpoint = engine_.open_fabric();
  if (!unknown_ || !measuring_pair(topology, rank) || endpoint == nullptr) return {};
  std::vector<std::string> hosts;
  for (const RankInfo& info : infos) hosts.push_back(info.host);
  cache_.emplace(hosts, *endpoint);
  auto found = anew_ ? std::nullopt : cache_->load(seconds_since_1970());
  return found ? text_of(*found) : std::string();
}

void NetworkAgreement::take_recalled(const std::string& recalled) {
  auto found = parse_measured_network(recalled);
  auto model = found ? parse_network_model(found->model) : Result<NetworkModel>(NetworkModel{});
  if (!unknown_ || !found || !model) return;
  model_ = model.value();
  unknown_ = false;
  remember("measured on " + date_of(found->measured));
}

std::string NetworkAgreement::measure(Store& store, const Topology& topology, Rank rank) {
  return measure_network(engine_, store, topology, rank, options_);
}

// If no measurement has succeeded, the network counts as known all the same, so that not every group tries
// again.
Status NetworkAgreement::take(const std::string& agreed, Rank rank) {
  if (!agreed.empty()) {
    Result<NetworkModel> model = parse_network_model(agreed);
    if (!model) return model.status();
    model_ = model.value();
    if (cache_) cache_->store({text_of(model_), seconds_since_1970()});
  } else if (rank == 0) {
    log(LogLevel::kWarning, "the network of group '" + options_.name +
                                "' could not be measured; operations assume " + text_of(model_) +
                                ", as with SMDDP_FABRIC_CURVE=default");
  }
  unknown_ = false;
  remember(agreed.empty() ? "assumed, as it could not be measured" : "measured now");
  return {};
}

void NetworkAgreement::remember(const std::string& source) {
  Engine::Lock lock = engine_.lock();
  engine_.network().remember({text_of(model_), source});
}

std::string agree_on_recalled(const std::vector<std::string>& recalled, const Topology& topology) {
  std::optional<MeasuredNetwork> all;
  for (int host = 0; host < topology.nodes(); ++host) {
    if (!measuring_pair(topology, topology.node(host)[0])) continue;
    auto found = parse_measured_network(recalled[static_cast<size_t>(host)]);
    if (!found || (all && all->model != found->model)) return {};
    found->measured = std::min(found->measured, all ? all->measured : found->measured);
    all = found;
  }
  return all ? text_of(*all) : std::string();
}

Result<std::string> stored_network(Engine& engine, const std::vector<std::string>& hosts) {
  auto endpoint = engine.fabric();
  if (!endpoint) return endpoint.status();
  auto found = NetworkCache(hosts, *endpoint.value()).load(seconds_since_1970());
  if (!found) return std::string();
  return found->model + ", measured on " + date_of(found->measured);
}

}  // namespace smddp
