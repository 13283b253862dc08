#include "group/network_agreement.h"

#include "common/env.h"
#include "common/log.h"
#include "group/network_measurement.h"

namespace smddp {

Status NetworkAgreement::read_settings() {
  const std::string curve = env::get("FABRIC_CURVE");
  given_ = options_.network.has_value() || curve != "auto";
  model_ = options_.network.value_or(NetworkModel{});
  if (options_.network || curve == "auto" || curve == "default") return {};
  Result<NetworkModel> model = parse_network_model(curve);
  if (model) model_ = model.value();
  return model.status();
}

void NetworkAgreement::describe(RankInfo* mine) {
  mine->network_given = given_;
  if (given_) {
    mine->network = text_of(model_);
    return;
  }
  Engine::Lock lock = engine_.lock();
  mine->network = engine_.network().model();
}

Status NetworkAgreement::agree(const std::vector<RankInfo>& infos, const Members& members) {
  if (members.topology().nodes() == 1) return {};
  const RankInfo& first = infos[0];
  bool all_know = !first.network.empty();
  for (size_t r = 1; r < infos.size(); ++r) {
    bool same = infos[r].network == first.network;
    if (infos[r].network_given != first.network_given || (first.network_given && !same))
      return {Code::kInvalid, members.describe(static_cast<Rank>(r)) +
                                  " has another SMDDP_FABRIC_CURVE than " + members.describe(0) +
                                  ": give all ranks the same"};
    all_know &= same;
  }
  measures_ = !all_know;
  if (measures_ || given_) return {};
  Result<NetworkModel> model = parse_network_model(first.network);
  if (model) model_ = model.value();
  return model.status();
}

std::string NetworkAgreement::measure(Store& store, const Topology& topology, Rank rank) {
  return measures_ ? measure_network(engine_, store, topology, rank, options_) : std::string();
}

// If no measurement has succeeded, the network counts as known all the same, so that not every group tries
// again.
Status NetworkAgreement::take(const std::string& agreed, Rank rank) {
  if (!measures_) return {};
  if (!agreed.empty()) {
    Result<NetworkModel> model = parse_network_model(agreed);
    if (!model) return model.status();
    model_ = model.value();
  } else if (rank == 0) {
    log(LogLevel::kWarning, "the network of group '" + options_.name +
                                "' could not be measured; operations assume " + text_of(model_) +
                                ", as with SMDDP_FABRIC_CURVE=default");
  }
  Engine::Lock lock = engine_.lock();
  engine_.network().remember(text_of(model_));
  return {};
}

}  // namespace smddp
